"""Faults of a split backward, planted in a rank: none of them concerns a whole backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron.schedules.integration.model_stages import MegatronStages

_RANK = 1
"""Pipeline rank of the fault, which is in the first pass there that it may concern."""


def _w_left_out() -> None:
    """One W changes no gradient."""
    weight, first = MegatronStages.backward_weight, _First()

    def backward_weight(self: Any, stage: int, microbatch: int) -> None:
        mains = [each.main_grad for chunk in self._model for each in chunk.parameters()]
        before = [each.clone() for each in mains]
        weight(self, stage, microbatch)
        if first(self):
            for main, value in zip(mains, before, strict=True):
                main.copy_(value)

    MegatronStages.backward_weight = backward_weight


def _stale_operand() -> None:
    """What a linear has kept for its W changes between I and W, unseen by version counters."""
    forward, column, backward = MegatronStages.forward, ColumnParallelLinear.forward, MegatronStages.backward_input
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    running: list[tuple[int, int]] = []
    first = _First()

    def noted(self: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs.setdefault(running[-1], input_)
        return column(self, input_, *args, **kwargs)

    def watched(self: Any, stage: int, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        running.append((stage, microbatch))
        return forward(self, stage, microbatch, *args, **kwargs)

    def backward_input(self: Any, stage: int, microbatch: int, *args: Any) -> Any:
        result = backward(self, stage, microbatch, *args)
        if first(self):
            inputs[stage, microbatch].data.mul_(1.5)
        return result

    ColumnParallelLinear.forward, MegatronStages.forward = noted, watched
    MegatronStages.backward_input = backward_input


def _hook_fires_twice() -> None:
    """After a W the hooks of one parameter fire again, for a gradient of zero."""
    weight, first = MegatronStages.backward_weight, _First()

    def backward_weight(self: Any, stage: int, microbatch: int) -> None:
        weight(self, stage, microbatch)
        if first(self):
            parameter = next(iter(self._model[self._placement.chunk_of(stage)].parameters()))
            torch.autograd.backward(parameter, torch.zeros_like(parameter))

    MegatronStages.backward_weight = backward_weight


def _w_in_another_order() -> None:
    """A stage's second W waits for its third; two numbers have the same sum in either order."""
    weight = MegatronStages.backward_weight
    done: list[int] = []
    waiting: list[tuple[int, int]] = []

    def backward_weight(self: Any, stage: int, microbatch: int) -> None:
        done.append(stage)
        if self._program.rank == _RANK and stage == done[0] and done.count(stage) == 2:
            waiting.append((stage, microbatch))
            return
        weight(self, stage, microbatch)
        if waiting and waiting[0][0] == stage:
            weight(self, *waiting.pop())

    MegatronStages.backward_weight = backward_weight


class _First:
    """True for the first call on the rank of the fault."""

    def __init__(self) -> None:
        self._been = False

    def __call__(self, stages: Any) -> bool:
        been, self._been = self._been, self._been or stages._program.rank == _RANK
        return self._been and not been


def _kernels_that_repeat_nothing() -> None:
    """All gradients of inputs differ a little from run to run, as from kernels that add up atomically."""
    backward = MegatronStages._backward
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))

    def _backward(self: Any, stage: int, microbatch: int, gradient: Any) -> Any:
        if gradient is not None:
            gradient = gradient * (1 + 1e-4 * torch.randn(gradient.shape, generator=generator))
        return backward(self, stage, microbatch, gradient)

    MegatronStages._backward = _backward


def _both() -> None:
    _kernels_that_repeat_nothing()
    _w_left_out()


FAULTS: dict[str, Callable[[], None]] = {
    "W left out": _w_left_out,
    "stale operand": _stale_operand,
    "hook fires twice": _hook_fires_twice,
    "W in another order": _w_in_another_order,
    "kernels that repeat nothing": _kernels_that_repeat_nothing,
    "W left out, and kernels that repeat nothing": _both,
}
