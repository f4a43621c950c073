"""The autograd graph through which a W gives its gradients to parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.runtime.parameter_leaves import engine

Closure = Callable[[], Sequence[Tensor | None] | None]
"""Computes one operation's weight gradients: one for each parameter it was deferred with, or nothing."""

Uses = tuple[tuple[Tensor, ...], ...]
"""The parameters of each closure of a queue."""


class WeightGraph:
    """A backward that computes the gradients of a queue's closures, one closure after another.

    A node for each closure leads to its parameters and to the next node, and autograd visits parameters first. So each
    gradient is accumulated, and its parameter's hooks run, before the next one is computed. Where closures share a
    parameter autograd adds up their gradients, and its hooks fire once. Gradients are cast to the parameter's dtype.

    Args:
        uses: the parameters of each closure, in order.
    """

    def __init__(self, uses: Uses) -> None:
        self._compute: list[Closure] = []
        device = next((parameter.device for parameters in uses for parameter in parameters), None)
        start = following = torch.empty(0, device=device, requires_grad=True)
        with torch.enable_grad():
            for parameters in reversed(uses):
                following = _Node.apply(self._compute, following, *parameters)
        self._first, self._nothing = (following,), (start.detach(),)

    def run(self, compute: Closure) -> None:
        """Runs it; ``compute`` returns the gradients of one closure after another."""
        self._compute.append(compute)
        try:
            engine(self._first, self._nothing, True, False, (), True, accumulate_grad=True)
        finally:
            self._compute.pop()


class _Node(torch.autograd.Function):
    """An empty output of a closure's parameters and of the node that follows, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, compute: list[Closure], following: Tensor, *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.set_materialize_grads(False)
        return following.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.compute[-1]() or ())
