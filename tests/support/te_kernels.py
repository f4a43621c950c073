"""Norms, activations, softmax and optimizer steps of Transformer Engine's compiled half, in plain torch.

Every function has the name and parameters that Transformer Engine's Python uses. Sums are torch's, in fp32, so results
are close to a GPU's but not bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.te_types import torch_dtype


def delivered(result: Tensor, into: Any, quantizer: Any) -> Any:
    """Returns a kernel's result: ``result`` quantized, written to ``into``, or unchanged."""
    if quantizer is not None:
        return quantizer(result) if into is None else quantizer.update_quantized(result, into)
    return result if into is None else into.copy_(result.view_as(into))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, ln_out: Any, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Computes LayerNorm; returns output, mean and reciprocal standard deviation."""
    x = input.float()
    mu = x.mean(dim=-1)
    rsigma = torch.rsqrt(x.var(dim=-1, unbiased=False) + eps)
    y = (x - mu[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.float()
    return [delivered(y.to(torch_dtype(otype)), ln_out, quantizer), mu.flatten(), rsigma.flatten()]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Gradients of input, weight and bias."""
    dy = _rows(dz)
    normed = (_rows(x) - mu[:, None]) * rsigma[:, None]
    dn = dy * _gamma(gamma, zero_centered_gamma)
    dx = (dn - dn.mean(-1, keepdim=True) - normed * (dn * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return [dx.view(x.shape).to(gamma.dtype), (dy * normed).sum(0).to(gamma.dtype), dy.sum(0).to(gamma.dtype)]


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Computes RMSNorm; returns output, None for the mean, and the reciprocal root mean square."""
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(dim=-1) + eps)
    y = x * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    return [delivered(y.to(torch_dtype(otype)), ln_out, quantizer), None, rsigma.flatten()]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Gradients of input and weight."""
    dy, normed = _rows(dz), _rows(x) * rsigma[:, None]
    dn = dy * _gamma(gamma, zero_centered_gamma)
    dx = (dn - normed * (dn * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return [dx.view(x.shape).to(gamma.dtype), (dy * normed).sum(0).to(gamma.dtype)]


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, other = x.chunk(2, dim=-1)
        return activation(gate) * other

    return gated


def gelu(x: Tensor) -> Tensor:
    """GELU with the tanh approximation."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "qgelu": _qgelu,
    "relu": torch.relu,
    "srelu": _srelu,
    "silu": torch.nn.functional.silu,
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(gelu),
    "qgeglu": _gated(_qgelu),
    "reglu": _gated(torch.relu),
    "sreglu": _gated(_srelu),
    "swiglu": _gated(torch.nn.functional.silu),
}
"""Activation functions by the name of their forward kernel."""


def through(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of ``x`` from the gradient of ``function(x)``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, gradient)[0]


def _weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    gate, linear = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * linear * weights[:, None]


def scaled_swiglu(x: Tensor, weights: Tensor, quantizer: Any, interleaved: int) -> Tensor:
    """Returns SwiGLU of the rows of ``x``, each times its weight, in the type of ``x``."""
    assert quantizer is None and not interleaved
    return _weighted_swiglu(x.float(), weights.float()).to(x.dtype)


def scaled_dswiglu(
    gradient: Tensor, x: Tensor, weights: Tensor, quantizer: Any, interleaved: int, weighted: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`scaled_swiglu` with respect to ``x`` and, if ``weighted``, to the weights."""
    assert quantizer is None and not interleaved
    with torch.enable_grad():
        inputs = [each.detach().float().requires_grad_() for each in (x, weights)]
        of_x, of_weights = torch.autograd.grad(_weighted_swiglu(*inputs), inputs, gradient.float())
    return of_x.to(x.dtype), of_weights.to(weights.dtype) if weighted else None


def activation_kernels(name: str) -> dict[str, Callable[..., Any]]:
    """Returns the kernels of an activation by name: forward, backward, and backward with the bias gradient."""
    function = ACTIVATIONS[name]

    def forward(input: Tensor, quantizer: Any, *limits: Any, **more: Any) -> Any:
        return delivered(function(input.float()).to(input.dtype), None, quantizer)

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any, *limits: Any, **more: Any) -> Any:
        return delivered(through(function, fwd_input.float(), grad.float()).to(fwd_input.dtype), None, quantizer)

    def with_bias(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        dact = backward(grad, fwd_input, None)
        return [_rows(dact).sum(0).to(grad.dtype), delivered(dact, None, quantizer)]

    return {name: forward, f"d{name}": backward, f"dbias_d{name}": with_bias}


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """Returns the bias gradient, and the output's gradient quantized."""
    return [_rows(input).sum(0).to(input.dtype), input if quantizer is None else quantizer(input)]


def _softmax(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(x.float() * scale, dim=-1).to(x.dtype)


def _causal_softmax(x: Tensor, scale: float) -> Tensor:
    rows, columns = x.shape[-2:]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=x.device).triu(1 + columns - rows)
    return torch.softmax((x.float() * scale).masked_fill(hidden, -torch.inf), dim=-1).to(x.dtype)


def _masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax((x.float() * scale).masked_fill(mask, -10000.0), dim=-1).to(x.dtype)


def _softmax_backward(grad: Tensor, output: Tensor, scale: float) -> Tensor:
    y, g = output.float(), grad.float()
    return (scale * y * (g - (y * g).sum(-1, keepdim=True))).to(grad.dtype)


SOFTMAX: dict[str, Callable[..., Any]] = {
    "scaled_softmax_forward": _softmax,
    "scaled_masked_softmax_forward": _masked_softmax,
    "scaled_upper_triang_masked_softmax_forward": _causal_softmax,
    "scaled_aligned_causal_masked_softmax_forward": _causal_softmax,
    "scaled_softmax_backward": _softmax_backward,
    "scaled_masked_softmax_backward": _softmax_backward,
    "scaled_upper_triang_masked_softmax_backward": _softmax_backward,
    "scaled_aligned_causal_masked_softmax_backward": _softmax_backward,
}
"""Softmax of attention, forward and backward, by the kernel's name."""


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: Any, per_tensor: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors together, and with ``per_tensor`` the norm of each."""
    each = [tensor.float().norm() * scale for tensor in lists[0]]
    norms = torch.stack(each) if each else torch.zeros(1)
    return norms.norm().view(1), norms if per_tensor else torch.zeros(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop: Tensor, lists: Any, inverse_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the norms of gradients that are not yet divided by the loss scale."""
    return multi_tensor_l2norm(chunk_size, noop, lists, per_tensor, float(inverse_scale))


def multi_tensor_scale(chunk_size: int, noop: Tensor, lists: Any, scale: float | Tensor) -> None:
    """Writes scaled copies, and sets ``noop`` if a number is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        if not torch.isfinite(source).all():
            noop.fill_(1)


def multi_tensor_adam(
    chunk_size: int, noop: Tensor, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int,
    bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Runs a step of Adam, or of AdamW with mode 1. A fifth list contains fp32 main weights."""
    if noop.item():
        return
    one, two = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, param, first, second, *main in zip(*lists, strict=True):
        target = main[0] if main else param
        g, p = grad.float(), target.float()
        if mode == 0:
            g = g + weight_decay * p
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (first / one) / ((second / two).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * p
        target.copy_(p - lr * update)
        if main:
            param.copy_(target)
