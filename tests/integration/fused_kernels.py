"""Stands for Apex's kernels, which add a weight gradient to ``main_grad`` in the product itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor, float32


class Kernels:
    """The same sums, a count of the calls, and "product" in ``log`` for each."""

    def __init__(self, log: list[str]) -> None:
        self.calls = {"fp32": 0, "fp16": 0}
        self._log = log

    def wgrad_gemm_accum_fp32(self, total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype is float32
        self.calls["fp32"] += 1
        self._log.append("product")
        main_grad.add_(grad_output.t().float() @ total_input.float())

    def wgrad_gemm_accum_fp16(self, total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        self.calls["fp16"] += 1
        self._log.append("product")
        main_grad.add_(grad_output.t() @ total_input)


@contextmanager
def fused_kernels(log: list[str] | None = None) -> Iterator[Kernels]:
    """Let Megatron find such kernels."""
    from megatron.core.tensor_parallel import layers

    kernels = Kernels([] if log is None else log)
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield kernels


def forget() -> None:
    """Let Megatron find none in this process, as where Apex is not installed."""
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = False
    for names in (vars(layers), sys.modules):
        names.pop("fused_weight_gradient_mlp_cuda", None)
