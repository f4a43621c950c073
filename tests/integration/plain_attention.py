"""A core attention in plain torch that does what Transformer Engine's does and stock's local one refuses.

That is context parallelism, packed sequences, and heads whose values have another size than their queries and keys.
Slow and exact: every score is computed, and what must not be seen is masked. It lets jobs that need a GPU's attention
run on the CPU, stock's and ours alike.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models import backends
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_SEES_ALL = (AttnMaskType.no_mask, AttnMaskType.padding)


def put_in_place() -> None:
    """Let Megatron's local layers use it, in this process."""
    backends.DotProductAttention = PlainAttention


class PlainAttention(MegatronModule):
    """Scaled dot-product attention. Arguments as Transformer Engine's, as Megatron wraps it.

    As there, a mask handed to forward counts for nothing: the kind of mask and the packed sequences' bounds say all.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout or config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("plain attention has no dropout, no window and no softmax offset")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._group = groups.cp if config.context_parallel_size > 1 else None
        self._mask_type = attn_mask_type
        self._scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """The context of this rank's queries.

        Args:
            query: (s, b, heads, d), or packed (s, heads, d); s is this rank's share of the sequence.
            key: like query, with as many heads as there are query groups.
            value: like key, its d may be another.

        Returns:
            (s, b, heads * d of value), packed without b.
        """
        if attention_bias is not None:
            raise ValueError("plain attention takes no bias")
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        ranks = 1 if self._group is None else self._group.size()
        rank = 0 if self._group is None else self._group.rank()
        bounds = _bounds(packed_seq_params) if packed else [0, len(query) * ranks]
        mine, _ = _tokens(bounds, ranks, rank)
        if len(mine) != len(query):
            raise ValueError(f"{len(query)} queries here, {len(mine)} by the bounds {bounds} of the packed sequences")
        if self._group is not None:
            key, value = _Gathered.apply(key, self._group), _Gathered.apply(value, self._group)
        seen = _visible(bounds, ranks, rank, attn_mask_type or self._mask_type).to(query.device)
        context = _attend(query, key, value, seen, self._scale).flatten(-2)
        return context.squeeze(1) if packed else context


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """(queries, b, heads, d of value) from (queries, b, heads, d), (keys, b, groups, d), and who sees whom."""
    share = query.size(2) // key.size(2)
    key, value = (each.repeat_interleave(share, dim=2) for each in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key).float() * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value)


def _bounds(packed: PackedSeqParams) -> list[int]:
    """Where each packed sequence starts, and the end; padding belongs to the sequence before it, behind its tokens."""
    if packed.cp_group is not None or packed.local_cp_size is not None:
        raise ValueError("plain attention takes the context-parallel ranks as Megatron was started with")
    padded = packed.cu_seqlens_q_padded
    return list((packed.cu_seqlens_q if padded is None else padded).tolist())


def _tokens(bounds: list[int], ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """Of a rank's tokens: position in the whole, and number of the sequence. Each sequence is cut into twice as many
    pieces as there are ranks; a rank has one from the front and its mirror image from the back."""
    positions, numbers = [], []
    for number, (start, end) in enumerate(pairwise(bounds)):
        if ranks > 1 and (end - start) % (2 * ranks):
            raise ValueError(f"a sequence of {end - start} tokens does not divide into {2 * ranks} pieces")
        pieces = torch.arange(start, end).tensor_split(2 * ranks)
        positions += [pieces[rank], pieces[-1 - rank]]
        numbers.append(torch.full((len(pieces[rank]) + len(pieces[-1 - rank]),), number))
    return torch.cat(positions), torch.cat(numbers)


def _visible(bounds: list[int], ranks: int, rank: int, mask_type: AttnMaskType) -> Tensor:
    """Which of all keys, in the order of their ranks, each query of ``rank`` sees: (queries, keys)."""
    if mask_type not in (*_CAUSAL, *_SEES_ALL):
        raise ValueError(f"plain attention has no mask of type {mask_type}")
    position, number = _tokens(bounds, ranks, rank)
    each = [_tokens(bounds, ranks, other) for other in range(ranks)]
    positions, numbers = (torch.cat(parts) for parts in zip(*each, strict=True))
    together = number[:, None] == numbers
    return together & (positions <= position[:, None]) if mask_type in _CAUSAL else together


class _Gathered(torch.autograd.Function):
    """All ranks' tensors one after another; backward, this rank's slice of the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
