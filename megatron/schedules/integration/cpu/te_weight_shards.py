"""Kernels that write primary FP8 weights from shards of their fp32 main weights, in plain torch.

The distributed optimizer of Megatron calls them through ``pytorch/tensor/utils.py`` of Transformer Engine. A rank has a
flat part of each weight. Amaxes are reduced over the ranks, then each rank writes the bytes of its part. MXFP8 weights
are quantized whole instead, after their gather in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.cpu.te_quantized import block_maxima, cast, scale_for, spread
from megatron.schedules.integration.cpu.te_types import torch_dtype

_BY_LARGEST = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}


def _amax(tensor: Tensor, amax: Tensor) -> None:
    """Writes the largest magnitude of ``tensor``."""
    if tensor.numel():
        amax.copy_(tensor.float().abs().amax().view_as(amax))


def _scales(
    chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], largest: float, powers_of_two: bool,
    epsilon: float,
) -> None:  # fmt: skip
    """Writes the scales of amaxes, and their inverses."""
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_for(amax, _BY_LARGEST[largest], powers_of_two, epsilon))
        inverse.copy_(1 / scale)


def whole(shard: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Returns the weight, (rows, columns), with zeros outside of ``shard``, which begins at number ``start``."""
    zeros = shard.new_zeros(rows * columns)
    zeros[start : start + shard.numel()] = shard.view(-1)
    return zeros.view(rows, columns)


def _block_amaxes(shard: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int) -> None:
    """Writes the largest magnitude of each block in the shard; zero for a block outside of it."""
    found = block_maxima(whole(shard, rows, columns, start), squares=True)
    amax[: found.shape[0], : found.shape[1]] = found


def _cast_blocks(
    shard: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: Any
) -> None:
    """Writes the bytes of the shard by rows."""
    weight = whole(shard, rows, columns, start)
    data = cast(weight, spread(scale, weight.shape, squares=True), torch_dtype(dtype))
    out.copy_(data.view(-1)[start : start + shard.numel()])


KERNELS: dict[str, Callable[..., Any]] = {
    "compute_amax": _amax,
    "multi_tensor_compute_scale_and_scale_inv": _scales,
    "fp8_block_scaling_compute_partial_amax": _block_amaxes,
    "fp8_block_scaling_partial_cast": _cast_blocks,
}
"""By the names of Transformer Engine's compiled half."""
