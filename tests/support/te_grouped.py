"""Grouped products of Transformer Engine's fused operations whose group sizes stay on the device, in plain torch.

A GPU computes them without the host, so that CUDA graphs can have them; here each group is a product of all rows, with
the rows of other groups left out. Only for numbers that are not quantized: what a Blackwell GPU fuses in MXFP8 or NVFP4
has no stand-in. Based on ``pytorch/ops/basic/grouped_linear.py`` of Transformer Engine 2.20.2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LINEAR = "transformer_engine.pytorch.ops.basic.grouped_linear"


def splits_to_offsets(
    sizes: Tensor,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Returns the group sizes, and for each stride where groups begin in a buffer of that many numbers a row."""
    ends = sizes.to(torch.int64).cumsum(0)
    with_zero = torch.cat([torch.zeros_like(ends[:1]), ends])
    each = zip(strides, include_leading_zero, dtypes, strict=True)
    return sizes, [((with_zero if zero else ends) * stride).to(dtype) for stride, zero, dtype in each]


def _rows_of(grouped: Any) -> list[Tensor]:
    """For each group which rows belong to it, shape (rows, 1)."""
    ends = grouped.first_dims.to(torch.int64).cumsum(0)
    at = torch.arange(grouped.logical_shape[0])
    return [((at >= end - size) & (at < end))[:, None] for end, size in zip(ends, grouped.first_dims, strict=True)]


def _matrix(grouped: Any) -> Tensor:
    matrix: Tensor = grouped.rowwise_data.view(grouped.logical_shape)
    return matrix


def product(
    a: Any, b: Any, out: Any, *, layout: str = "TN", accumulate: bool = False, use_split_accumulator: bool = False,
    bias: Any = None, bias_scale: Tensor | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Replaces ``general_grouped_gemm_for_grouped_tensor``; ``a`` are weights, or inputs where ``out`` is gradients."""
    assert bias is None and bias_scale is None and not any(value is not None for value in more.values())
    rows, which = _matrix(b).float(), _rows_of(b)
    if layout == "NT":  # weight gradients
        inputs = _matrix(a).float()
        for into, own in zip(out, which, strict=True):
            total = torch.where(own, rows, 0.0).t() @ torch.where(own, inputs, 0.0)
            into.copy_(into.float() + total if accumulate else total)
        return out
    assert not accumulate
    result = torch.zeros_like(_matrix(out), dtype=torch.float32)
    for weight, own in zip(a, which, strict=True):
        result = torch.where(own, rows @ (weight.float().t() if layout == "TN" else weight.float()), result)
    _matrix(out).copy_(result)
    return out


def install() -> None:
    """Puts the products in the place of kernels, and marks inputs for a paged stash as fused kernels do."""
    linear = sys.modules[_LINEAR]
    mark = sys.modules["transformer_engine.pytorch.utils"].mark_grouped_tensor
    kind: Any = linear.GroupedLinear
    save = kind.fuser_forward_save_ctx

    def saving(self: Any, *args: Any, tensors_to_save: Any, **named: Any) -> None:
        mark(tensors_to_save[0][5])
        save(self, *args, tensors_to_save=tensors_to_save, **named)

    kind.fuser_forward_save_ctx = saving
    linear.is_op_fuser_grouped_tensor_path_supported = lambda recipe, dtype: recipe is None
    linear.general_grouped_gemm_for_grouped_tensor = torch.no_grad()(product)
    linear.tex.splits_to_offsets_multi = splits_to_offsets
    # Here rows need no alignment, so that a limit can be small.
    sys.modules["megatron.core.transformer.moe.token_dispatcher"].get_align_size_for_quantization = lambda config: 1
