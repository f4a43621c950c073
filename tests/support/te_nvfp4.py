"""NVFP4 tensors of Transformer Engine's compiled half, in plain torch (arXiv 2509.25149).

A number has four bits (e2m1), two to a byte. 16 numbers share a scale in e4m3, and a copy of a tensor shares one in
fp32, from its largest magnitude. The copy by columns of an input or a gradient is multiplied by a Hadamard matrix along
the tokens, which cancels in the product of the weight gradient. Gradients are rounded at random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.te_types import MissingError

_BLOCK = 16
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIGN = 8
_UNSUPPORTED = ("row_scaled_nvfp4", "nvfp4_use_4over6")


def copies(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """Returns the copies of ``x`` that the quantizer is set to, by the names of Transformer Engine's Python."""
    if any(getattr(quantizer, name, False) for name in _UNSUPPORTED):
        raise MissingError("quantize to NVFP4 with scales for rows, or with 4over6")
    rows = x.view(-1, x.shape[-1]).float()
    columns = rows.t().contiguous()
    if quantizer.with_rht:
        matrix = quantizer.rht_matrix.float()
        columns = (columns.view(-1, _BLOCK) @ matrix).view(columns.shape)
    found: dict[str, Any] = {}
    for side, lines in (("rowwise", rows), ("columnwise", columns)):
        data = scales = amax = None
        if getattr(quantizer, f"{side}_usage"):
            amax = lines.abs().amax().view(1)
            if quantizer.with_amax_reduction:
                group = quantizer.amax_reduction_group
                torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
            data, unpadded = _quantized(lines, amax, quantizer)
            if side == "rowwise":
                data = data.view(*x.shape[:-1], -1)
            scales = padded(unpadded)
        found |= {f"{side}_data": data, f"{side}_scale_inv": scales, f"amax_{side}": amax}
    return found


def padded(scales: Tensor, multiples: tuple[int, int] = (128, 4)) -> Tensor:
    """Returns scales with zeros up to ``multiples``, as products of matrices read them."""
    down, across = (-size % multiple for size, multiple in zip(scales.shape, multiples, strict=True))
    return torch.nn.functional.pad(scales, (0, across, 0, down))


def matrix(tensor: Any, columnwise: bool) -> Tensor:
    """Returns the values of a copy in fp32, in the tensor's shape. By columns they still have the Hadamard matrix."""
    side = "columnwise" if columnwise else "rowwise"
    data, scales, amax = (getattr(tensor, f"_{name}") for name in (f"{side}_data", f"{side}_scale_inv", f"amax_{side}"))
    assert data is not None, f"no {side} copy"
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    signs = torch.where(codes >= _SIGN, -1.0, 1.0)
    values = signs * _MAGNITUDES[(codes % _SIGN).long()]
    lines = values.flatten(1) if columnwise else values.flatten(0, -2)
    factors = scales[: lines.shape[0], : lines.shape[1] // _BLOCK].view(torch.float8_e4m3fn).float()
    scaled = lines * (factors * amax / (_LARGEST * _LARGEST_SCALE)).repeat_interleave(_BLOCK, 1)
    whole = scaled.view(codes.shape)
    return whole.movedim(0, -1) if columnwise else whole


def _quantized(lines: Tensor, amax: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Returns the bytes (lines, numbers / 2) and the scales (lines, numbers / 16) in bytes."""
    maxima = lines.view(lines.shape[0], -1, _BLOCK).abs().amax(-1)
    if quantizer.with_2d_quantization:
        maxima = _spread(square_maxima(lines))
    whole = whole_scale(amax)
    scales = block_scales(maxima, whole)
    return packed(lines, scales, whole, at_random=quantizer.stochastic_rounding), scales.view(torch.uint8)


def square_maxima(lines: Tensor) -> Tensor:
    """Returns the largest magnitude of each block of 16 x 16 numbers."""
    maxima = lines.view(lines.shape[0], -1, _BLOCK).abs().amax(-1)
    return maxima.view(-1, _BLOCK, maxima.shape[1]).amax(1)


def whole_scale(amax: Tensor) -> Tensor:
    """Returns the scale in fp32 of a copy whose largest magnitude is ``amax``."""
    return torch.where(amax > 0, _LARGEST * _LARGEST_SCALE / amax, 1.0)


def block_scales(maxima: Tensor, whole: Tensor) -> Tensor:
    """Returns the scales of blocks in e4m3."""
    return (maxima / _LARGEST * whole).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)


def packed(lines: Tensor, scales: Tensor, whole: Tensor, *, at_random: bool) -> Tensor:
    """Returns the bytes of ``lines``, two numbers in each."""
    each = scales.float()
    factors = torch.where(each > 0, whole / each, 0.0)
    scaled = (lines.view(lines.shape[0], -1, _BLOCK) * factors[..., None]).view(lines.shape)
    magnitudes = scaled.abs().clamp(max=_LARGEST)
    codes = _at_random(magnitudes) if at_random else _nearest(magnitudes)
    codes = codes + _SIGN * (scaled < 0)
    pairs = codes.to(torch.uint8).view(lines.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def _spread(squares: Tensor) -> Tensor:
    """Expands what squares of 16 x 16 numbers have to their 16 rows."""
    return squares.repeat_interleave(_BLOCK, 0)


def _part_amaxes(shards: Any, blocks: Any, amaxes: Any, heights: Any, widths: Any, starts: Any, block: int) -> None:
    """Writes the largest magnitudes of squares, and of all, in shards of weights."""
    for shard, each, amax, *where in zip(shards, blocks, amaxes, heights, widths, starts, strict=True):
        each.copy_(square_maxima(whole_weight(shard, *where).float()))
        amax.copy_(each.amax())


def _global_scales(amaxes: Tensor, scales: Tensor) -> None:
    scales.copy_(whole_scale(amaxes))


def _part_scales(
    blocks: Any, amaxes: Any, scales: Any, stored: Any, stored_amaxes: Any, heights: Any, widths: Any, padded_to: Any,
    block: int,
) -> None:  # fmt: skip
    """Writes the scales of squares, for :func:`_cast_parts` and as the weights store them."""
    for each, amax, scale, into, into_amax, height, width in zip(
        blocks, amaxes, scales, stored, stored_amaxes, heights, widths, strict=False
    ):
        found = block_scales(each, whole_scale(amax))
        scale.copy_(found.float())
        into[: height * _BLOCK, :width] = _spread(found.view(torch.uint8))
        into_amax.copy_(amax)


def _cast_parts(
    shards: Any, outs: Any, scales: Any, wholes: Any, heights: Any, widths: Any, starts: Any, block: int
) -> None:
    """Writes the bytes of shards by rows."""
    for shard, out, scale, whole, height, width, start in zip(
        shards, outs, scales, wholes, heights, widths, starts, strict=True
    ):
        assert start % 2 == shard.numel() % 2 == 0, "a byte of two ranks"
        data = packed(whole_weight(shard, height, width, start).float(), _spread(scale), whole, at_random=False)
        out.copy_(data.view(-1)[start // 2 : (start + shard.numel()) // 2])


def _transposed(rows: Any, columns: Any, row_scales: Any, column_scales: Any, heights: Any, widths: Any) -> None:
    """Makes copies of weights by columns of those by rows: their squares have the same scales."""
    for data, into, scales, into_scales, height, width in zip(
        rows, columns, row_scales, column_scales, heights, widths, strict=True
    ):
        codes = torch.stack([data & 15, data >> 4], -1).view(height, width).t()
        into.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        squares = scales[:height:_BLOCK, : width // _BLOCK]
        into_scales[:width, : height // _BLOCK] = _spread(squares.t())


def whole_weight(shard: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Returns a weight, (rows, columns), with zeros outside of ``shard``, which begins at number ``start``."""
    zeros = shard.new_zeros(rows * columns)
    zeros[start : start + shard.numel()] = shard.view(-1)
    return zeros.view(rows, columns)


WEIGHT_KERNELS: dict[str, Callable[..., None]] = {
    "nvfp4_multi_tensor_compute_partial_amax": _part_amaxes,
    "nvfp4_compute_global_scale": _global_scales,
    "nvfp4_multi_tensor_fused_scale": _part_scales,
    "nvfp4_multi_tensor_2d_partial_cast": _cast_parts,
    "nvfp4_2d_multi_tensor_transpose": _transposed,
}
"""Kernels that write primary weights, by the names of Transformer Engine's compiled half."""


def round_to_nearest() -> None:
    """Does what Transformer Engine does by an environment variable, which it reads before it knows the job."""
    recipe = importlib.import_module("transformer_engine.common.recipe").NVFP4BlockScaling
    prepare = recipe.__post_init__

    def post_init(self: Any) -> None:
        self.disable_stochastic_rounding = True
        prepare(self)

    recipe.__post_init__ = post_init


def _nearest(magnitudes: Tensor) -> Tensor:
    """Codes of the nearest magnitudes; halfway between two, that of the even code."""
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
    return torch.bucketize(magnitudes, middles)


def _at_random(magnitudes: Tensor) -> Tensor:
    """Codes of one of the two next magnitudes, more likely of the nearer one."""
    below = (torch.bucketize(magnitudes, _MAGNITUDES, right=True) - 1).clamp(max=len(_MAGNITUDES) - 2)
    low, high = _MAGNITUDES[below], _MAGNITUDES[below + 1]
    return below + (torch.rand_like(magnitudes) < (magnitudes - low) / (high - low))
