"""Mamba and gated delta net layers of Megatron's own Python, whose kernels run on a CPU and keep what the real ones do.

The kernels of mamba_ssm and flash-linear-attention are replaced by other differentiable functions of the same inputs,
which save tensors of the same sizes for their backward. All else is stock's. ``--spec tests.integration.kernel_mixers
STACK`` puts these layers into a hybrid model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor


class _Kernel(torch.autograd.Function):
    """A function that keeps its inputs and new tensors of the sizes ``beside``, and computes again in its backward."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], beside: Sequence[tuple[Any, torch.dtype]], *inputs: Tensor
    ) -> Tensor:
        there = [each.contiguous() for each in inputs]
        ctx.compute, ctx.inputs = compute, len(there)
        ctx.save_for_backward(*there, *(torch.zeros(size, dtype=dtype) for size, dtype in beside))
        return compute(*there)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # What the replacement needs for a moment is no matter of the kernel: the meter sees nothing under these hooks.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors[: ctx.inputs]]
            output = ctx.compute(*inputs)
        return None, None, *torch.autograd.grad(output, inputs, gradients, allow_unused=True)


def _scan(zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, a: Tensor, **how: Any) -> Tensor:
    skip = how["D"]
    inner, rest = skip.shape[0] * how["headdim"], weight.shape[0]

    def compute(zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, a: Tensor, d: Tensor) -> Tensor:
        z, xbc, steps = zxbcdt.split([inner, rest, d.shape[0]], dim=-1)
        x = (xbc * weight.sum(-1) + bias)[..., :inner].unflatten(-1, (d.shape[0], -1))
        steps = torch.sigmoid(steps + dt_bias) * a.exp() + d
        return (x * steps.unsqueeze(-1)).flatten(-2).to(z.dtype) * torch.nn.functional.silu(z)

    before_gate = (*zxbcdt.shape[:2], inner), zxbcdt.dtype
    return _Kernel.apply(compute, [before_gate], zxbcdt, weight, bias, dt_bias, a, skip)


class _GroupNorm(torch.nn.Module):
    def __init__(self, width: int, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self._groups = width // group_size

    def forward(self, x: Tensor) -> Tensor:
        def compute(x: Tensor, weight: Tensor) -> Tensor:
            groups = x.float().unflatten(-1, (self._groups, -1))
            return (groups * groups.square().mean(-1, keepdim=True).add(1e-5).rsqrt()).flatten(-2).to(x.dtype) * weight

        roots = (*x.shape[:-1], self._groups), torch.float32
        return _Kernel.apply(compute, [roots], x, self.weight)


def _convolution(x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, None]:
    return _Kernel.apply(lambda x, weight: torch.nn.functional.silu(x * weight.sum(-1)), [], x, weight), None


class _Norm(torch.autograd.Function):
    """Keeps what it returns, and a root a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.float().square().sum(-1, keepdim=True).add(1e-6).rsqrt()
        y = (x * root).to(x.dtype)
        ctx.save_for_backward(y, root)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, root = ctx.saved_tensors
        (gradient,) = gradients
        return ((gradient - y * (gradient * y).sum(-1, keepdim=True)) * root).to(y.dtype)


_CHUNK = 64


def _rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    def compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return (v * ((q * k).sum(-1) * g.exp() * beta).unsqueeze(-1)).to(v.dtype)

    inverse = (*q.shape[:3], _CHUNK), q.dtype
    return _Kernel.apply(compute, [inverse], q, k, v, g, beta), None


def _gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """What torch.compile makes of stock's function: it keeps both factors and computes the gate again."""
    y = self.out_norm(x.reshape(-1, x.shape[-1]))
    gate = gate.reshape(-1, gate.shape[-1])
    return _Kernel.apply(lambda y, gate: (y * torch.nn.functional.silu(gate.float())).to(y.dtype), [], y, gate)


_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "d 1 w -> d w": lambda x: x.squeeze(1),
}


def _put_in_place() -> None:
    mixer: Any = mamba_mixer
    mixer.HAVE_MAMBA_SSM = mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = common.HAVE_FLA = True
    mixer.mamba_split_conv1d_scan_combined, mixer.ExtendedRMSNorm = _scan, _GroupNorm
    mixer.rearrange = lambda x, pattern, **_: _SHAPES[pattern](x)
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule, common.l2norm = _convolution, _rule, _Norm.apply
    common._GDNBase._apply_gated_norm = _gated


_put_in_place()
STACK = hybrid_stack_spec
