"""Cases of one replayed layer, whose graph is a function on static memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.schedules.integration.graphs.replay import FUSED, Replay
from megatron.schedules.runtime.deferred_gradient import Replayed
from megatron.schedules.runtime.weight_gradients import WeightGradients


class Static(torch.autograd.Function):
    """Twice the input, in the same memory each time; its gradient too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, graph: Graph) -> Tensor:
        ctx.graph = graph
        graph.output.copy_(2 * hidden)
        return graph.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.graph.gradient.copy_(2 * gradient)
        return ctx.graph.gradient.detach(), None


class Graph:
    """A graphed callable as Transformer Engine makes it."""

    def __init__(self) -> None:
        self.output, self.gradient, self.given = torch.zeros(3), torch.zeros(3), dict[str, Any]()
        self.weights = 0

    def __call__(self, hidden: Tensor, **given: Any) -> tuple[Tensor]:
        self.given = given
        return (Static.apply(hidden, self),)

    def backward_dw(self) -> None:
        self.weights += 1


def outputs_of_an_evaluation_are_not_overwritten() -> None:
    graph = Graph()
    replay = Replay(graph, lambda: None, set(), [], is_first=True)
    first, second = (replay(torch.full((3,), number))[0] for number in (1.0, 2.0))
    assert first.tolist() == [2.0] * 3 and second.tolist() == [4.0] * 3


def the_first_microbatch_is_that_of_the_plan() -> None:
    store = WeightGradients()
    for is_first in (True, False):
        graph = Graph()
        Replay(graph, lambda: store, set(), None, is_first=is_first)(torch.ones(3), is_first_microbatch=not is_first)
        assert graph.given == {"is_first_microbatch": is_first}


def a_mask_that_nobody_reads_is_the_static_one() -> None:
    graph, mask = Graph(), torch.zeros(1)
    Replay(graph, WeightGradients, set(), None, is_first=True, mask=mask)(torch.ones(3), attention_mask=torch.ones(1))
    assert graph.given["attention_mask"] is mask


def w_is_replayed_by_the_queue_and_the_inputs_gradient_is_its_own() -> None:
    store, volatile, graph = WeightGradients(), set[int](), Graph()
    weight = torch.nn.Parameter(torch.zeros(2))
    replay = Replay(graph, lambda: store, volatile, [(weight, torch.full((2,), 5.0))], is_first=True)
    hidden, seen = torch.ones(3, requires_grad=True), list[Tensor]()
    hidden.register_hook(seen.append)
    with store.split(0, 0):
        (output,) = replay(hidden)
    assert volatile == {graph.output.data_ptr()}
    with store.input_gradient(0, 0):
        output.sum().backward()
    assert store.waiting(0, 0) == 1 and graph.weights == 0
    store.run(0, 0)
    assert graph.weights == 1 and weight.grad is not None and weight.grad.tolist() == [5.0] * 2
    graph.gradient.fill_(7.0)
    assert [each.tolist() for each in seen] == [[2.0] * 3]


def an_added_gradient_is_told_to_hooks() -> None:
    store, graph, fired = WeightGradients(), Graph(), list[bool]()
    weight: Any = torch.nn.Parameter(torch.zeros(2))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(2), False
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad_added_to_main_grad))
    replay = Replay(graph, lambda: store, set(), [(weight, FUSED)], is_first=True)
    with store.split(0, 0):
        (output,) = replay(torch.ones(3))
    with store.input_gradient(0, 0):
        output.sum().backward()
    assert fired == []
    store.run(0, 0)
    assert fired == [True]


def a_backward_of_a_forward_step_is_refused() -> None:
    store, graph = WeightGradients(), Graph()
    replay = Replay(graph, lambda: store, set(), [(torch.nn.Parameter(torch.zeros(2)), FUSED)], is_first=True)
    with store.split(0, 0):
        (output,) = replay(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="cannot go through CUDA graphs"):
            output.sum().backward()


def w_runs_ahead_behind_a_message() -> None:
    """Graphs in their order, since they share memory; none behind one that gathers operands at a fixed point."""
    sizes = [Replayed(6.0, gathers=False), Replayed(), Replayed(6.0, gathers=False)]
    store, graphs = WeightGradients(), [Graph() for _ in sizes]
    hidden = torch.ones(3, requires_grad=True)
    with store.split(0, 0):
        for graph, size in zip(graphs, sizes, strict=True):
            weight = torch.nn.Parameter(torch.zeros(2))
            gradients = [(weight, torch.ones(2))]
            replay = Replay(graph, lambda: store, set(), gradients, is_first=True, size=size)
            (hidden,) = replay(hidden)
    with store.input_gradient(0, 0):
        hidden.sum().backward()
    assert store.flops(0, 0) == 12
    ran = lambda: [graph.weights for graph in reversed(graphs)]  # noqa: E731 - the last layer's I comes first
    assert store.run_ahead([(0, 0)], 2.0) == 2.0 and ran()[::-1] == [0, 0, 0], "the first is too long"
    assert store.run_ahead([(0, 0)], 100.0) == 94.0 and ran()[::-1] == [0, 0, 1]
    store.run(0, 0)
    assert ran() == [1, 1, 1]


CASES = (
    w_runs_ahead_behind_a_message,
    outputs_of_an_evaluation_are_not_overwritten,
    the_first_microbatch_is_that_of_the_plan,
    a_mask_that_nobody_reads_is_the_static_one,
    w_is_replayed_by_the_queue_and_the_inputs_gradient_is_its_own,
    an_added_gradient_is_told_to_hooks,
    a_backward_of_a_forward_step_is_refused,
)
