"""Replaces ``transformer_engine_torch``, the compiled half of Transformer Engine, on a CPU.

:mod:`.te_python` makes Transformer Engine's Python load this file in place of its shared library. This file has the
matrix products; the other kernels are in :mod:`.te_kernels`, :mod:`.te_attention`, :mod:`.te_quantized` and
:mod:`.te_userbuffers`. Based on ``pytorch/csrc/extensions/`` of Transformer Engine 2.18. A missing name raises
:class:`.te_types.MissingError` when it is called.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import te_attention, te_kernels, te_quantized, te_userbuffers
from tests.support.te_types import DType, MissingError, torch_dtype

# Enum members that are indices, or renamed on import. The others are those that Transformer Engine's Python names.
_ENUMS: dict[str, tuple[str, ...]] = {
    "FP8FwdTensors": tuple(f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": tuple(f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")),
    "NVTE_Fused_Attn_Backend": ("NVTE_No_Backend",),
    "NVTERoutingMapFormat": ("BYTEMAP", "BITMAP_U8"),
    "NVTEQBHistogramMode": ("TWO_KERNEL", "FUSED_ATOMIC"),
} | dict.fromkeys(
    (
        "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_Softmax_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout",
        "NVTEScalingMode", "CommOverlapType", "CommOverlapAlgo", "Float8BlockScaleTensorFormat",
    ),
    (),
)  # fmt: skip
_num_cublas_streams = 1  # read before 2.4


def product(
    a: Any, trans_a: bool, b: Any, trans_b: bool, out: Tensor | None, quantizer: Any, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None,
    comm_type: Any = None, extra_output: Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:  # fmt: skip
    """Computes ``op(B) @ op(A)`` in fp32: cuBLAS has columns where torch has rows. Replaces ``generic_gemm``."""
    if comm_overlap is not None:

        def alone() -> list[Any]:
            return product(
                a, trans_a, b, trans_b, out, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad, workspace,
                workspace_size, accumulate, use_split_accumulator, alpha=alpha, beta=beta,
            )  # fmt: skip

        found = te_userbuffers.overlapped(alone, comm_overlap, comm_type, bulk_overlap, extra_output)
        return [*found[:3], extra_output]
    left, right = _operand(a, not trans_a), _operand(b, trans_b)
    dtype = (a.dtype if isinstance(a, Tensor) else a._dtype) if output_dtype is None else torch_dtype(output_dtype)
    rows, lead = right.reshape(-1, right.shape[-1]), right.shape[:-1]
    matrix = left.reshape(-1, left.shape[-1])
    if trans_b:
        rows, lead = rows.t(), rows.shape[1:]
    total = alpha * (rows.float() @ (matrix.t() if trans_a else matrix).float())
    bias_grad = before_gelu = None
    if bias is not None and grad:
        bias_grad = right.reshape(-1, right.shape[-1]).float().sum(dim=0).to(dtype)
    elif bias is not None:
        total = total + bias.float()
    if gelu and not grad:
        before_gelu = total.to(dtype).view(*lead, total.shape[-1])
        total = te_kernels.gelu(before_gelu.float()).view_as(total)
    elif gelu:
        assert gelu_in is not None
        total = te_kernels.through(te_kernels.gelu, gelu_in.float().view_as(total), total)
    if out is None:
        assert not accumulate
        whole = total.to(dtype).view(*lead, total.shape[-1])
        out = whole if quantizer is None else quantizer(whole)
    else:
        assert quantizer is None and out.numel() == total.numel() and out.dtype == dtype
        into = out.view_as(total)
        into.copy_(into.float() + total if accumulate else total)
    return [out, bias_grad, before_gelu, extra_output]


def grouped_product(
    a: Sequence[Any], trans_a: bool, b: Sequence[Any], trans_b: bool, out: Sequence[Tensor], out_type: Any,
    m_splits: Sequence[int] | None, bias: Sequence[Tensor], bias_type: Any, single_output: bool,
    pre_gelu_out: Sequence[Tensor], grad: bool, workspaces: Any, workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, sm_count: int,
) -> Sequence[Tensor]:  # fmt: skip
    """Runs :func:`product` for each group and returns bias gradients. Replaces ``te_general_grouped_gemm``."""
    assert not any(each.numel() for each in pre_gelu_out), "no GELU in grouped products"
    outs = list(out)
    if single_output:  # the results are parts of one tensor
        sizes = [math.prod(each.size()[:-1]) for each in b]
        whole = out[0].reshape(-1, out[0].shape[-1])
        outs = list(whole[: sum(sizes)].split(sizes))
    for one, other, into, each in zip(a, b, outs, bias, strict=True):
        if not math.prod(other.size()) or not math.prod(one.size()):
            if into.numel() and not accumulate:
                into.zero_()
            if grad and each.numel():
                each.zero_()
            continue
        added = each if each.numel() else None
        _, bias_grad, *_ = product(
            one, trans_a, other, trans_b, into, None, into.dtype, added, bias_type, False, None, grad, workspaces[0],
            workspace_size, accumulate, use_split_accumulator,
        )  # fmt: skip
        if bias_grad is not None:
            each.copy_(bias_grad)
    return bias


def _operand(tensor: Any, columnwise: bool) -> Tensor:
    return tensor if type(tensor) in (Tensor, torch.nn.Parameter) else te_quantized.matrix(tensor, columnwise)


def _split_quantize(tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Any], *_: Any, **__: Any) -> Any:
    return _multi_tensor_quantize(tensor.split(sections), quantizers)


def _multi_tensor_quantize(tensors: Sequence[Tensor], quantizers: Sequence[Any]) -> Any:
    return [te_quantized.quantize(*each) for each in zip(tensors, quantizers, strict=True)]


def _fused_multi_quantize(tensors: Sequence[Tensor], outputs: None, quantizers: Sequence[Any], dtype: Any) -> Any:
    """Name and arguments of this function in 2.3."""
    return _multi_tensor_quantize(tensors, quantizers)


def _pad_rows(tensor: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """Writes groups of rows to ``out``, each followed by zeros."""
    for part, into in zip(tensor.split(list(rows)), out.split(list(padded)), strict=True):
        into.zero_()[: part.shape[0]] = part


def _unpad_rows(tensor: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """Undoes :func:`_pad_rows`."""
    for part, into in zip(tensor.split(list(padded)), out.split(list(rows)), strict=True):
        into.copy_(part[: into.shape[0]])


def _fused_attention(*parameters: Any) -> Any:
    """Returns the kernel, if there is one; from 2.20 on, which passes all parameters in one, also the reason."""
    kernels = globals()["NVTE_Fused_Attn_Backend"]
    here = te_attention.supported(*parameters)
    kernel = kernels.NVTE_F16_arbitrary_seqlen if here else kernels.NVTE_No_Backend
    return (kernel, "" if here else "no GPU") if len(parameters) == 1 else kernel


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generic_gemm": product,
    "te_general_grouped_gemm": grouped_product,
    "scaled_swiglu": te_kernels.scaled_swiglu,
    "scaled_dswiglu": te_kernels.scaled_dswiglu,
    "layernorm_fwd": te_kernels.layernorm_fwd,
    "layernorm_bwd": te_kernels.layernorm_bwd,
    "rmsnorm_fwd": te_kernels.rmsnorm_fwd,
    "rmsnorm_bwd": te_kernels.rmsnorm_bwd,
    "bgrad_quantize": te_kernels.bgrad_quantize,
    "quantize": te_quantized.quantize,
    "dequantize": te_quantized.dequantize,
    "create_empty_quantized_tensor": te_quantized.empty,
    "fp8_transpose": te_quantized.fp8_transpose,
    "swap_first_dims": te_quantized.swap_first_dims,
    "fused_amax_and_scale_update_after_reduction": te_quantized.update_scales,
    "split_quantize": _split_quantize,
    "multi_tensor_quantize": _multi_tensor_quantize,
    "fused_multi_quantize": _fused_multi_quantize,
    "fused_multi_row_padding": _pad_rows,
    "fused_multi_row_unpadding": _unpad_rows,
    "multi_tensor_l2norm": te_kernels.multi_tensor_l2norm,
    "multi_tensor_unscale_l2norm": te_kernels.multi_tensor_unscale_l2norm,
    "multi_tensor_scale": te_kernels.multi_tensor_scale,
    "multi_tensor_scale_tensor": te_kernels.multi_tensor_scale,
    "multi_tensor_adam": te_kernels.multi_tensor_adam,
    "get_fused_attn_backend": _fused_attention,
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 92000,
    "get_num_cublas_streams": lambda: 1,
    "get_stream_priority_range": lambda device_id=-1: (0, -5),
}
_FUNCTIONS |= te_kernels.SOFTMAX | te_attention.KERNELS | te_quantized.WEIGHT_KERNELS | te_userbuffers.FUNCTIONS
for _name in te_kernels.ACTIVATIONS:
    _FUNCTIONS |= te_kernels.activation_kernels(_name)


def _enum(name: str, python: str) -> Any:
    members = dict.fromkeys([*_ENUMS[name], *re.findall(rf"\b{name}\.([A-Z]\w+)", python)])
    return enum.IntEnum(name, {member: at for at, member in enumerate(members)})


def _members() -> dict[str, Any]:
    """Returns all implemented names of the compiled half.

    Enums have the members that Transformer Engine's Python names.
    """
    package = sys.modules.get("transformer_engine")
    files = [] if package is None else Path(package.__path__[0], "pytorch").rglob("*.py")
    python = "\n".join(path.read_text() for path in files)
    functions = {name: torch.no_grad()(function) for name, function in _FUNCTIONS.items()}
    return {"DType": DType} | {name: _enum(name, python) for name in _ENUMS} | functions | te_userbuffers.CLASSES


def _missing(self: Any, *args: Any, **kwargs: Any) -> None:
    raise MissingError(f"transformer_engine_torch.{type(self).__name__}")


def __getattr__(name: str) -> Any:
    """Returns a class that raises when it is called.

    Transformer Engine's Python may also use it as a base or an annotation.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, type(name, (), {"__init__": _missing}))


globals().update(_members())
