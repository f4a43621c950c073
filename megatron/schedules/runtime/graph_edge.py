"""Where a stage's backward starts and ends, once its output has been sent and neither that nor its input is held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edge_of(output: Tensor) -> GradientEdge:
    """Where a backward from ``output`` starts: it keeps the graph alive, and not the output.

    It is that of a view, whose node is torch's own. Of the node of an autograd Function in Python, which may well be a
    stage's last step, an edge holds Python's half up to torch 2.8; the other half goes with the output, and the process
    with the backward.
    """
    return get_gradient_edge(output.view_as(output))


class InputGradient:
    """The gradient of a stage's input, after its backward: ``grad``, as a leaf has it, but nothing of the input."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None


def as_input(activation: Tensor) -> tuple[Tensor, InputGradient]:
    """``activation`` for a graph that begins with it, and what takes its gradient.

    A leaf would have to be kept for its gradient, and its data with it, even where all that was saved of it is away.
    """
    taken = InputGradient()
    anchor = torch.empty(0, device=activation.device, requires_grad=True)
    begun: Tensor = _Input.apply(anchor, activation, taken)
    return begun, taken


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, activation: Tensor, taken: InputGradient) -> Tensor:
        ctx.taken = taken
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.taken.grad = gradient
        return None, None, None
