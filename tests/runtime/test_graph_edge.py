"""A stage keeps where its backward starts, and not its output: the graph outlives the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megatron.schedules.runtime.graph_edge import backward_from, edge_of


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


@pytest.mark.parametrize("backward", [torch.autograd.backward, backward_from])
@pytest.mark.parametrize("in_python", [False, True])
def test_the_graph_outlives_the_output_whatever_made_it(in_python: bool, backward: Callable[..., None]) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    output = Tripled.apply(2 * x) if in_python else 6 * x
    assert isinstance(output.grad_fn, BackwardCFunction) == in_python
    edge = edge_of(output)
    # Such a node would be gone with the output in the oldest torch that we promise to work with.
    assert not isinstance(edge.node, BackwardCFunction)
    del output
    backward(edge, torch.full((4, 2), 0.5))
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]] * 4


def test_a_loss_needs_no_gradient() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    backward_from((2 * x).sum(), None)
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("start", [lambda output: output, edge_of])
def test_what_is_no_loss_needs_one(start: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="starts from one number"):
        backward_from(start(2 * torch.ones(4, 2, requires_grad=True)), None)
