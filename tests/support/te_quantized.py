"""Quantized tensors of Transformer Engine's compiled half, in plain torch: per-tensor scales, MXFP8 and blockwise.

NVFP4 is in :mod:`.te_nvfp4`.

Follows ``pytorch/csrc/quantizer.cpp``: the copies of a tensor (by rows, by columns) and their memory layout. A product
of matrices reads the copy that a GPU's kernels would read, so a copy that was freed too early is an error here too.

Megatron's distributed optimizer writes primary FP8 and FP4 weights from shards of their fp32 main weights, through
``pytorch/tensor/utils.py`` of Transformer Engine. A rank has a flat part of each weight. Amaxes are reduced over the
ranks, then each rank writes the bytes of its part. MXFP8 weights are quantized whole, after their gather in bf16.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support import te_nvfp4
from tests.support.te_types import MissingError, torch_dtype

_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_BY_LARGEST = {largest: dtype for dtype, largest in _MAX.items()}
_MX, _BLOCK = 32, 128
_COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Returns ``tensor`` quantized, written to ``output`` if given."""
    if noop is not None and torch.cuda.is_current_stream_capturing():
        return _unless(noop, tensor, quantizer, output)
    if noop is not None and noop.item():
        return output
    x = tensor.detach().contiguous()
    kind = type(quantizer).__name__
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        return _per_tensor(x, quantizer, output)
    if kind == "MXFP8Quantizer":
        return _blocked(x, quantizer, output, "MXFP8Tensor", _mx_copies(x, quantizer))
    if kind == "Float8BlockQuantizer":
        return _blocked(x, quantizer, output, "Float8BlockwiseQTensor", _blockwise_copies(x, quantizer))
    if kind == "NVFP4Quantizer":
        return _blocked(x, quantizer, output, "NVFP4Tensor", te_nvfp4.copies(x, quantizer))
    raise MissingError(f"quantize with {kind}")


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
    """Returns a quantized tensor of zeros, without changing the quantizer."""
    untouched = quantizer.copy()
    if hasattr(untouched, "amax"):
        untouched.amax = untouched.amax.clone()
    if hasattr(untouched, "with_amax_reduction"):
        untouched.with_amax_reduction = False
    if hasattr(untouched, "stochastic_rounding"):
        untouched.stochastic_rounding = False  # zeros need no random numbers
    return quantize(torch.zeros(tuple(shape), dtype=dtype), untouched)


def _unless(noop: Tensor, tensor: Tensor, quantizer: Any, output: Any) -> Any:
    """Quantizes into ``output`` unless ``noop``, which a replay of a CUDA graph reads anew."""
    buffers = [buffer for buffer in vars(output).values() if type(buffer) is Tensor]
    before = [buffer.clone() for buffer in buffers]
    quantize(tensor, quantizer, output)
    for buffer, kept in zip(buffers, before, strict=True):
        numbers = buffer.view(torch.uint8)
        numbers.copy_(torch.where(noop.bool(), kept.view(torch.uint8), numbers))
    return output


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Returns the values, from the copy by rows if there is one."""
    by_rows = tensor._data if _by_tensor(tensor) else tensor._rowwise_data
    return matrix(tensor, columnwise=by_rows is None).to(torch_dtype(dtype))


def matrix(tensor: Any, columnwise: bool) -> Tensor:
    """Returns the copy of a quantized tensor that a product reads, in fp32 and in its logical shape."""
    if hasattr(tensor, "_fp4_dtype"):
        return te_nvfp4.matrix(tensor, columnwise)
    dtype = torch_dtype(getattr(tensor, "_fp8_dtype", None))
    if _by_tensor(tensor):
        if columnwise and _has_transposes():
            assert tensor._transpose is not None and not tensor._transpose_invalid, "no copy by columns"
            return (tensor._transpose.view(dtype).float() * tensor._scale_inv).movedim(0, -1)
        assert tensor._data is not None, "no copy by rows"
        return tensor._data.view(dtype).float() * tensor._scale_inv
    side = "columnwise" if columnwise else "rowwise"
    data, scales = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    assert data is not None, f"no {side} copy"
    values = data.view(dtype).float()
    if hasattr(tensor, "_is_2D_scaled"):
        flat = values.view(values.shape[0], -1) if columnwise else values.view(-1, values.shape[-1])
        scaled = (flat * _factors(scales, flat.shape, tensor._is_2D_scaled)).view(values.shape)
        return scaled.movedim(0, -1) if columnwise else scaled
    flat = values.view(-1, values.shape[-1])
    m, k = flat.shape
    exponents = scales[: math.ceil(m / _MX), :k] if columnwise else scales[:m, : math.ceil(k / _MX)]
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(_MX, 0 if columnwise else 1)[:m, :k]
    return (flat * factors).view(values.shape)


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Returns ``data`` with its last dimension first."""
    turned = _transposed(data)
    return turned if out is None or out.shape != turned.shape else out.copy_(turned)


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns ``tensor`` with its first two dimensions exchanged."""
    turned = tensor.transpose(0, 1).contiguous()
    return turned if out is None else out.copy_(turned.view_as(out))


def update_scales(
    amaxes: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """Delayed scaling: advances all histories by one step and computes the scales (``delayed_scaling.cu``).

    Nothing is read on the host, so that a model of CUDA graphs can record it.
    """
    largest, at = _MAX[torch_dtype(dtype)] / 2**margin, 0
    for history, scale in zip(histories, scales, strict=True):
        own, flat = amaxes[at : at + scale.numel()], scale.view(-1)
        last = torch.where(own != 0, own, history[0])
        rolled, known = torch.cat([history[1:], last[None]]), last != 0
        amax = last if algorithm == "most_recent" else torch.where(known, rolled.amax(0), 0.0)
        advanced = torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]])
        history.copy_(torch.where(known, advanced, history))
        computed = (largest / amax).clamp(max=torch.finfo(torch.float32).max)
        flat.copy_(torch.where(torch.isfinite(amax) & (amax > 0), computed, flat))
        at += scale.numel()


def _by_tensor(tensor: Any) -> bool:
    return hasattr(tensor, "_transpose_invalid")


def _has_transposes() -> bool:
    """Returns whether products accept per-tensor FP8 only by rows, as on GPUs before Blackwell."""
    return torch.cuda.get_device_capability() < (10, 0)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of ``x`` times ``scale`` in ``dtype``."""
    return (x.float() * scale).clamp(-_MAX[dtype], _MAX[dtype]).to(dtype).view(torch.uint8)


def _transposed(data: Tensor) -> Tensor:
    return data.movedim(-1, 0).contiguous()


def scale_for(amax: Tensor, dtype: torch.dtype, powers_of_two: bool, epsilon: float) -> Tensor:
    """Returns the scale with which ``amax``, or at least ``epsilon``, becomes the largest number of ``dtype``."""
    amax = amax.clamp(min=max(epsilon, 0.0))
    scale = torch.where(amax > 0, _MAX[dtype] / amax, 1.0)
    return torch.exp2(torch.floor(torch.log2(scale))) if powers_of_two else scale


def _made(quantizer: Any, kind: str, x: Tensor, parts: dict[str, Any]) -> Any:
    """Returns a tensor of Transformer Engine's Python, or the smaller object that its own modules use."""
    module = sys.modules[type(quantizer).__module__]
    whole = getattr(module, kind)
    known = inspect.signature(whole.__new__).parameters
    parts |= {"fp4_dtype" if "fp4_dtype" in known else "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if "with_gemm_swizzled_scales" in known:
        parts["with_gemm_swizzled_scales"] = False
    if "data_format" in known:
        formats = sys.modules["transformer_engine_torch"].Float8BlockScaleTensorFormat
        parts["data_format"] = formats.COMPACT if _is_compact(quantizer) else formats.GEMM_READY
    if not quantizer.internal:
        return whole(shape=x.shape, dtype=x.dtype, **parts)
    storage = getattr(module, f"{kind}Storage", None) or getattr(module, f"{kind}Base")
    if "fake_dtype" in inspect.signature(storage.__new__).parameters:
        parts["fake_dtype"] = x.dtype
    return storage(**parts)


def _per_tensor(x: Tensor, quantizer: Any, output: Any) -> Any:
    dtype = torch_dtype(quantizer.dtype)
    amax = x.float().abs().amax().view(1) if x.numel() else torch.zeros(1)
    if hasattr(quantizer, "with_amax_reduction"):  # current scaling
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = scale_for(amax, dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    else:
        if quantizer.amax.numel():  # a weight with current scaling is written with a scale that is known
            quantizer.amax.copy_(amax.view_as(quantizer.amax))
        scale = quantizer.scale.clone().view(1)
    data = cast(x, scale, dtype)
    columns = _transposed(data) if quantizer.columnwise_usage and _has_transposes() else None
    rows = data if quantizer.rowwise_usage or not _has_transposes() else None
    if output is None:
        parts = {"data": rows, "fp8_scale_inv": 1 / scale, "data_transpose": columns}
        return _made(quantizer, "Float8Tensor", x, parts)
    _written(output, {"data": rows, "transpose": columns, "scale_inv": 1 / scale})
    output._transpose_invalid = columns is None and _has_transposes()
    return output


def _written(output: Any, parts: dict[str, Any]) -> None:
    for name, new in parts.items():
        if not isinstance(new, Tensor):
            continue
        old = getattr(output, f"_{name}")
        if old is not None and old.shape == new.shape:
            old.copy_(new)
        else:
            setattr(output, f"_{name}", new)


def _blocked(x: Tensor, quantizer: Any, output: Any, kind: str, copies: dict[str, Any]) -> Any:
    if output is None:
        return _made(quantizer, kind, x, copies)
    for name in _COPIES:
        if copies[name] is None:  # what is not asked for would be stale: the compiled half leaves none
            setattr(output, f"_{name}", None)
    _written(output, copies)
    return output


def _mx_copies(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """MXFP8: 32 numbers share an exponent, along rows in one copy and along columns in the other."""
    dtype, flat = torch_dtype(quantizer.dtype), x.view(-1, x.shape[-1])
    copies: dict[str, Any] = dict.fromkeys(_COPIES)
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        if not getattr(quantizer, f"{side}_usage"):
            continue
        lines = flat.t().contiguous() if columnwise else flat
        m, k = lines.shape
        blocks = lines.float().view(m, k // _MX, _MX)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / _MAX[dtype])).clamp(-127, 127)
        data = cast(blocks, torch.exp2(-exponent)[..., None], dtype).view(m, k)
        scales = (exponent + 127).to(torch.uint8)
        if columnwise:
            data, scales = data.t().contiguous(), scales.t().contiguous()
        copies[f"{side}_data"] = data.view(x.shape)
        copies[f"{side}_scale_inv"] = te_nvfp4.padded(scales, (4, 128) if columnwise else (128, 4))
    return copies


def _blockwise_copies(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """Blockwise: 128 numbers of a row share a scale, or 128 x 128 of a weight.

    The copy by columns is transposed. Before 2.16, what is to be gathered is compact: nothing of it is transposed.
    """
    dtype, flat = torch_dtype(quantizer.dtype), x.view(-1, x.shape[-1])
    squares, compact = quantizer.block_scaling_dim == 2, _is_compact(quantizer)
    copies: dict[str, Any] = dict.fromkeys(_COPIES)
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        if not getattr(quantizer, f"{side}_usage"):
            continue
        lines = flat.t().contiguous() if columnwise else flat
        scale = scale_for(block_maxima(lines, squares), dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        data = cast(lines, spread(scale, lines.shape, squares), dtype)
        stored = scale if squares or (compact and not columnwise) else scale.t()
        copies[f"{side}_scale_inv"] = _padded(1 / stored, quantizer.get_scale_shape(x.shape, columnwise))
        data = data.t().contiguous() if compact and columnwise else data
        copies[f"{side}_data"] = data.view(quantizer.get_columnwise_shape(x.shape) if columnwise else x.shape)
    return copies | {"is_2D_scaled": squares}


def _is_compact(quantizer: Any) -> bool:
    return getattr(quantizer, "all_gather_usage", False) and quantizer.block_scaling_dim == 1


def block_maxima(lines: Tensor, squares: bool) -> Tensor:
    """Largest magnitude of each block: (rows, blocks of a row), or with ``squares`` of 128 rows together."""
    m, k = lines.shape
    down = math.ceil(m / _BLOCK) * _BLOCK if squares else m
    across = math.ceil(k / _BLOCK) * _BLOCK
    whole = torch.zeros(down, across)
    whole[:m, :k] = lines.float().abs()
    maxima = whole.view(down, across // _BLOCK, _BLOCK).amax(-1)
    return maxima.view(down // _BLOCK, _BLOCK, -1).amax(1) if squares else maxima


def spread(scale: Tensor, shape: Sequence[int], squares: bool) -> Tensor:
    """Expands the scale of each block to its elements."""
    if squares:
        scale = scale.repeat_interleave(_BLOCK, 0)
    return scale.repeat_interleave(_BLOCK, 1)[: shape[0], : shape[1]]


def _factors(scales: Tensor, shape: Sequence[int], squares: bool) -> Tensor:
    blocks = math.ceil(shape[1] / _BLOCK)
    scale = scales[:, :blocks] if squares else scales.t()[: shape[0], :blocks]
    return spread(scale, shape, squares)


def _padded(scales: Tensor, shape: Sequence[int]) -> Tensor:
    whole = torch.zeros(tuple(shape), dtype=scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole


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


def _block_amaxes(shard: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int) -> None:
    """Writes the largest magnitude of each block in the shard; zero for a block outside of it."""
    found = block_maxima(te_nvfp4.whole_weight(shard, rows, columns, start), squares=True)
    amax[: found.shape[0], : found.shape[1]] = found


def _cast_blocks(
    shard: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: Any
) -> None:
    """Writes the bytes of the shard by rows."""
    weight = te_nvfp4.whole_weight(shard, rows, columns, start)
    data = cast(weight, spread(scale, weight.shape, squares=True), torch_dtype(dtype))
    out.copy_(data.view(-1)[start : start + shard.numel()])


WEIGHT_KERNELS: dict[str, Callable[..., Any]] = {
    "compute_amax": _amax,
    "multi_tensor_compute_scale_and_scale_inv": _scales,
    "fp8_block_scaling_compute_partial_amax": _block_amaxes,
    "fp8_block_scaling_partial_cast": _cast_blocks,
    **te_nvfp4.WEIGHT_KERNELS,
}
"""Kernels that write primary weights, by the names of Transformer Engine's compiled half."""
