"""The attention that stands in for Transformer Engine's: against stock's own, one sequence at a time, and one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.split_helpers import config, run_ranks
from tests.tolerances import assert_near, likely

SEQUENCE, BATCH, HEADS = 16, 2, 4


def _inputs(groups: int, value_size: int = 4) -> list[Tensor]:
    torch.manual_seed(3)
    sizes = ((HEADS, 4), (groups, 4), (groups, value_size))
    return [torch.randn(SEQUENCE, BATCH, *size, requires_grad=True) for size in sizes]


def _attention(kind: str = "plain", **changes: Any) -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from tests.integration.plain_attention import PlainAttention

    channels = {key: changes.pop(key) for key in ("k_channels", "v_channels") if key in changes}
    settings = config(hidden_size=16, num_attention_heads=HEADS, masked_softmax_fusion=False, **changes)
    settings.attention_dropout = 0.0
    make = PlainAttention if kind == "plain" else DotProductAttention
    return make(settings, 1, AttnMaskType.causal, "self", **channels)


def _results(attention: Any, inputs: list[Tensor], weights: Tensor | None = None, **packed: Any) -> list[Tensor]:
    """The context and, for a loss that weighs every element of it differently, the inputs' gradients."""
    # Stock makes a mask by itself only where there is a GPU; the other takes no notice of it.
    hidden = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
    context = attention(*inputs, hidden, **packed)
    weights = _weights(context.shape) if weights is None else weights
    return [context.detach(), *torch.autograd.grad((context * weights).sum(), inputs)]


def _weights(shape: Sequence[int]) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).reshape(*shape)


def _packed(bounds: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cumulated = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cumulated, cu_seqlens_kv=cumulated)


def _assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Equal but for roundings: of a score, a softmax, a context, and backwards of a row for each head of a group.

    A score that is off changes its probability by as much, relatively, so errors grow with the largest score.
    """
    roundings = (4 + 3 * SEQUENCE) + (6 + 3 * SEQUENCE + HEADS * SEQUENCE)
    query, key = (float(each.detach().norm(dim=-1).max()) for each in inputs[:2])
    largest_score = query * key / math.sqrt(4)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, 2 * likely(roundings) * (1 + largest_score))


def _as_stock(groups: int) -> None:
    inputs = _inputs(groups)
    found, expected = (_results(_attention(kind, num_query_groups=groups), inputs) for kind in ("plain", "stock"))
    _assert_same(found, expected, inputs)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_it_is_stocks_where_stock_has_one(groups):
    run_ranks(1, _as_stock, groups)


WIDER_VALUES: dict[str, Any] = {"num_query_groups": 2, "k_channels": 4, "v_channels": 6}


def _packed_as_apart(bounds: list[int]) -> None:
    inputs = [each[:, 0].detach().requires_grad_() for each in _inputs(2, value_size=6)]
    attention = _attention(**WIDER_VALUES)

    def apart(*whole: Tensor) -> Tensor:
        pairs = pairwise(bounds)
        single = ([each[start:end, None] for each in whole[:3]] for start, end in pairs)
        return torch.cat([attention(*inputs, None).squeeze(1) for inputs in single])

    _assert_same(_results(attention, inputs, packed_seq_params=_packed(bounds)), _results(apart, inputs), inputs)


def test_packed_sequences_do_not_see_each_other():
    run_ranks(1, _packed_as_apart, [0, 3, 4, 16])


def _share(whole: Tensor, bounds: list[int], rank: int) -> Tensor:
    """What one of two context-parallel ranks has: of every sequence's four pieces the outer or inner two."""
    pieces = [whole[start:end].chunk(4) for start, end in pairwise(bounds)]
    return torch.cat([part for each in pieces for part in (each[rank], each[3 - rank])])


def _as_one_rank(bounds: list[int], packed: bool) -> None:
    rank = torch.distributed.get_rank()
    inputs, extra = _inputs(2, value_size=6), {}
    if packed:
        inputs = [each[:, 0].detach().requires_grad_() for each in inputs]
        extra = {"packed_seq_params": _packed(bounds)}
    alone = _results(_attention(**WIDER_VALUES), inputs, **extra)
    weights = _share(_weights(alone[0].shape), bounds, rank)
    mine = [_share(each, bounds, rank).detach().requires_grad_() for each in inputs]
    found = _results(_attention(context_parallel_size=2, **WIDER_VALUES), mine, weights, **extra)
    _assert_same(found, [_share(each, bounds, rank) for each in alone], inputs)


@pytest.mark.parametrize(
    ("bounds", "packed"), [([0, SEQUENCE], False), ([0, 4, SEQUENCE], True)], ids=["one sequence", "packed"]
)
def test_two_context_parallel_ranks_are_one(bounds, packed):
    run_ranks(2, _as_one_rank, bounds, packed, context_parallel_size=2)
