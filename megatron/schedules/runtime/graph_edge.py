"""Start and end of a stage's backward, without its output, which has been sent, and without its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable


def edge_of(output: Tensor) -> GradientEdge:
    """Returns where a backward from ``output`` starts; it keeps the graph alive, but not the output.

    Up to torch 2.8 an edge to a Python autograd Function, which a stage's last step may be, holds only Python's half of
    the node; the other half is freed with the output, and the backward crashes the process. There the edge is that of a
    view, whose node is torch's own.
    """
    node: Any = output.grad_fn
    if isinstance(node, BackwardCFunction):
        output = output.view_as(output)
    return get_gradient_edge(output)


def backward_from(root: GradientEdge | Tensor, gradient: Tensor | None, *, keep_graph: bool = False) -> None:
    """Runs one of the engine's own backwards, as stock's schedules run theirs; ``gradient`` of a loss may be None.

    ``torch.autograd.backward`` also compares ``gradient`` with the root and hands a context to each node, which takes
    the host 30 microseconds, and serves those who watch the backwards of user code, such as :class:`.ParameterLeaves`.

    Raises:
        RuntimeError: there is no gradient, and ``root`` is not one number.
    """
    if gradient is None:
        if isinstance(root, GradientEdge) or root.numel() != 1:
            raise RuntimeError("a backward without a gradient starts from one number: a loss")
        gradient = torch.ones_like(root, memory_format=torch.preserve_format)
    Variable._execution_engine.run_backward(
        (root,), (gradient,), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


class InputGradient:
    """Receives the gradient of a stage's input in ``grad``, like a leaf, without keeping the input."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None


def as_input(activation: Tensor) -> tuple[Tensor, InputGradient]:
    """Returns ``activation`` as the start of a graph, and the object that receives its gradient.

    A leaf would have to be kept for its gradient, and its data with it, even where all that was saved is offloaded.
    """
    gradient = InputGradient()
    anchor = torch.empty(0, device=activation.device, requires_grad=True)
    begun: Tensor = _Input.apply(anchor, activation, gradient)
    return begun, gradient


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, activation: Tensor, result: InputGradient) -> Tensor:
        ctx.result = result
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        # As a leaf: user code may have run a backward of its own.
        ctx.result.grad = gradient if ctx.result.grad is None else ctx.result.grad + gradient
        return None, None, None
