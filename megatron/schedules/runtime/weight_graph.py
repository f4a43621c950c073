"""The autograd graph through which a W gives its gradients to parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.runtime.graph_edge import backward_from

Closure = Callable[[], Sequence[Tensor | None] | None]
"""Computes one operation's weight gradients: one for each parameter it was deferred with, or nothing."""

Uses = tuple[tuple[Tensor, ...], ...]
"""The parameters of each closure of a queue."""


# Bytes of the parameters that a node leads to, if it has several closures. The node's gradients are in memory together.
_TOGETHER = 2**24


class WeightGraph:
    """A backward that computes the gradients of a queue's closures, one closure after another.

    A node leads to the parameters of a closure, or of several small ones, and to the next node, and autograd visits
    parameters first. So a node's gradients are accumulated, and their parameters' hooks run, before the next node's are
    computed. Each node takes the host time. Where closures share a parameter autograd adds up their gradients, and its
    hooks fire once. Gradients are cast to the parameter's dtype.

    Args:
        uses: the parameters of each closure, in order.
        last: whether each closure is the last of its node, because the next one overwrites its gradients.
    """

    def __init__(self, uses: Uses, last: Sequence[bool]) -> None:
        self._compute: list[Closure] = []
        device = next((parameter.device for parameters in uses for parameter in parameters), None)
        self._nothing = torch.empty(0, device=device)
        nodes = _small_together(uses, last)
        # Autograd runs only what leads to a leaf, and takes the host time for each.
        following: Any = None if any(nodes[-1]) else torch.empty(0, device=device, requires_grad=True)
        with torch.enable_grad():
            for together in reversed(nodes):
                counts = [len(parameters) for parameters in together]
                following = _Node.apply(self._compute, counts, self._nothing, following, *chain(*together))
        self._first = following

    def run(self, compute: Closure) -> None:
        """Runs it; ``compute`` returns the gradients of one closure after another."""
        self._compute.append(compute)
        try:
            backward_from(self._first, self._nothing, keep_graph=True)
        finally:
            self._compute.pop()


def _small_together(uses: Uses, last: Sequence[bool]) -> list[list[tuple[Tensor, ...]]]:
    """Returns the parameters of the closures of each node."""
    nodes: list[list[tuple[Tensor, ...]]] = []
    left = 0
    for parameters, ends in zip(uses, last, strict=True):
        size = sum(parameter.nbytes for parameter in parameters)
        if not nodes or size > left:
            nodes.append([])
            left = _TOGETHER
        left = -1 if ends else left - size
        nodes[-1].append(parameters)
    return nodes


class _Node(torch.autograd.Function):
    """An empty output of closures' parameters and of the node that follows, if any, which gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: list[Closure],
        counts: list[int],
        nothing: Tensor,
        following: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.compute, ctx.counts = compute, counts
        ctx.set_materialize_grads(False)
        return nothing.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        compute, gradients = ctx.compute[-1], list[Tensor | None]()
        for count in ctx.counts:
            gradients += compute() or (None,) * count
        return None, None, None, None, *gradients
