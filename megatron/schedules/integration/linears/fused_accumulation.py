"""Gradient accumulation fusion: products that add to ``main_grad``, also without Apex, through Transformer Engine.

Megatron's local linears, and so every output layer, add to ``main_grad`` with a kernel of Apex, and refuse the fusion
if Apex is not installed. Transformer Engine's matrix product can add to its output too. Its own linears use it for the
same purpose.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as stock
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import ENGINE


def fuse_without_apex() -> None:
    """Gives Megatron's local linears such a kernel if Apex's is missing and Transformer Engine is imported."""
    if stock._grad_accum_fusion_available or not stock.HAVE_TE:
        return
    gemm = importlib.import_module(f"{ENGINE}.cpp_extensions").general_gemm
    # Later versions find the workspace themselves.
    needs_workspace = "workspace" in inspect.signature(gemm).parameters

    def add(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        if total_input.dtype == main_grad.dtype:  # of fp32, Transformer Engine would round the operands to TF32
            main_grad.addmm_(grad_output.t(), total_input)
            return
        workspace: dict[str, Any] = {}
        if needs_workspace:
            workspace["workspace"] = importlib.import_module(f"{ENGINE}.module.base").get_workspace()
        gemm(
            total_input,
            grad_output,
            **workspace,
            out_dtype=main_grad.dtype,
            layout="NT",
            out=main_grad,
            accumulate=True,
            grad=True,
        )

    stock.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    stock._grad_accum_fusion_available = True


def add_to_main_grad(weight: Any, total_input: Tensor, grad_output: Tensor) -> None:
    """Adds the weight gradient to ``weight.main_grad`` inside the product (gradient accumulation fusion)."""
    kernels = stock.fused_weight_gradient_mlp_cuda
    main_grad = weight.main_grad
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
    else:
        raise RuntimeError(f"gradient accumulation fusion cannot add to a main_grad of {main_grad.dtype}")


def fused_gradient(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """Returns what stock's backward gives autograd for a weight whose gradient is already in ``main_grad``.

    Under Megatron's data parallelism this is a tensor of ``dtype`` that only fires the hooks; it is zero if
    ``zero_out_wgrad`` adds it. Otherwise it is None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    shape, zero = weight.main_grad.shape, getattr(weight, "zero_out_wgrad", False)
    if stock.HAVE_TE:
        return stock.get_dummy_wgrad(list(shape), dtype, zero=zero)
    make = torch.zeros if zero else torch.empty
    return make(shape, dtype=dtype, device=weight.main_grad.device)
