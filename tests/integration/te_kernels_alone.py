"""Kernels that stand for Transformer Engine's, against what they must compute: run in forked ranks."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

HEADS, GROUPS, SIZE, LENGTH = 4, 2, 8, 16


def _attend(tensors: list[Tensor], gradient: Tensor, form: str, *, ring: bool = False, **named: Any) -> list[Tensor]:
    """The context, (tokens, heads * d), and gradients of queries, keys and values."""
    mask = "padding_causal" if form == "thd" else "causal"
    attention = te.DotProductAttention(
        HEADS, SIZE, num_gqa_groups=GROUPS, attention_dropout=0.0, attn_mask_type=mask, qkv_format=form
    )
    if ring:
        attention.set_context_parallel_group(torch.distributed.group.WORLD, [0, 1], torch.cuda.Stream(), "p2p")
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    context = attention(*leaves, **named)
    context.backward(gradient.view_as(context))
    return [context.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _drawn(*lead: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(1)
    tensors = [torch.randn(*lead, heads, SIZE).bfloat16() for heads in (HEADS, GROUPS, GROUPS)]
    return tensors, torch.randn(*lead, HEADS * SIZE).bfloat16()


def _close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Equal but for sums of a few roundings of bf16."""
    assert len(found) == len(wanted) == 4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.view_as(one), rtol=2**-6, atol=2**-6 * float(other.abs().max()))


def whole_attention() -> None:
    """Torch's own attention, in fp32."""
    tensors, gradient = _drawn(LENGTH, 2)
    leaves = [tensor.float().requires_grad_() for tensor in tensors]
    query, key, value = (leaf.permute(1, 2, 0, 3) for leaf in leaves)
    context = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    context = context.permute(2, 0, 1, 3).flatten(-2)
    context.backward(gradient.float())
    wanted = [context.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    _close(_attend(tensors, gradient, "sbhd"), [each.bfloat16() for each in wanted])


def ring_attention() -> None:
    """Each rank's share of the whole sequence's attention."""
    rank = torch.distributed.get_rank()

    def share(tensor: Tensor) -> Tensor:
        quarters = tensor.chunk(4)
        return torch.cat([quarters[rank], quarters[3 - rank]])

    tensors, gradient = _drawn(LENGTH, 2)
    whole = _attend(tensors, gradient, "sbhd")
    _close(
        _attend([share(each) for each in tensors], share(gradient), "sbhd", ring=True), [share(each) for each in whole]
    )


def packed_attention() -> None:
    """Two packed sequences attend as each by itself."""
    tensors, gradient = _drawn(LENGTH)
    bounds = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    longest = {"max_seqlen_q": 11, "max_seqlen_kv": 11}
    packed = _attend(tensors, gradient, "thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **longest)
    alone = [
        _attend([each[one].unsqueeze(1) for each in tensors], gradient[one], "sbhd")
        for one in (slice(0, 5), slice(5, LENGTH))
    ]
    _close(packed, [torch.cat(parts).squeeze(1) for parts in zip(*alone, strict=True)])


def fp4_numbers() -> None:
    """Numbers that NVFP4 has come back as they were; others are rounded to a neighbour, at random in the mean right."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    known = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0]).repeat(32, 8).bfloat16()
    both = NVFP4Quantizer()(known)
    assert torch.equal(both.dequantize(dtype=torch.float32), known.float())
    both.update_usage(rowwise_usage=False, columnwise_usage=True)
    turned = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(known)
    products = [_by_columns(each).t() @ _by_columns(each) for each in (both, turned)]
    exact = known.float().t() @ known.float()
    # A scale of a block is rounded to three bits; the Hadamard matrix makes numbers that are rounded to one bit.
    torch.testing.assert_close(products[0], exact, rtol=(1 + 2**-4) ** 2 - 1, atol=0)
    torch.testing.assert_close(products[1], exact, rtol=0, atol=0.25 * float(exact.abs().max()))
    middle = torch.full((16, 4096), 2.25).bfloat16()
    middle[0, ::16] = 6.0
    rounded = NVFP4Quantizer(stochastic_rounding=True)(middle).dequantize(dtype=torch.float32)[0].view(-1, 16)[:, 1:]
    assert set(rounded.unique().tolist()) == {2.0, 3.0}
    assert abs(float((rounded == 3).float().mean()) - 0.25) < 6 * (0.25 * 0.75 / rounded.numel()) ** 0.5


def _by_columns(tensor: Any) -> Tensor:
    from tests.support.te_nvfp4 import matrix

    return matrix(tensor, columnwise=True)
