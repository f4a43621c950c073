"""Passes that compute nothing and take their known time from call to return: the same for every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.schedules.planning.costs import Costs, StageCosts
from megatron.schedules.planning.passes import Kind
from megatron.schedules.planning.placement import sequential

SHAPE = (16, 1, 64)
"""Of every message: sequence, batch, hidden."""

_TRIAL_S, _TRIALS = 0.005, 31


class Passes:
    """The passes of one schedule on one rank.

    Args:
        costs: their times in seconds.
        around: what calling each kind takes besides, as :func:`time_around` finds it: so much less is slept.
    """

    def __init__(self, costs: StageCosts, around: Mapping[Kind, float]) -> None:
        self._seconds, self._around = costs.durations, around
        self.pace = 1.0
        """Times are multiplied by this: a warm-up need not last long."""

    def run(self, kind: Kind, stage: int) -> None:
        """Sleep for the pass's time."""
        time.sleep(max(self._seconds[kind][stage] * self.pace - self._around[kind], 0.0))


class Layers(nn.Module):
    """A stage as autograd sees it: its forward is F, its backward ``backward``: B, or I where W is run by itself."""

    def __init__(self, passes: Passes, stage: int, backward: Kind) -> None:
        super().__init__()
        self.passes, self.stage, self.kind = passes, stage, backward
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeping.apply(x, self.weight, self)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layers: Layers) -> Tensor:
        ctx.layers = layers
        layers.passes.run(Kind.F, layers.stage)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.layers.passes.run(ctx.layers.kind, ctx.layers.stage)
        return gradient.clone(), torch.zeros(()), None


def time_around() -> dict[Kind, float]:
    """What autograd takes around a pass of each kind, and a sleep over its time: what would overlap on a GPU.

    It is the least of many trials, so that no pass takes less than its time.
    """
    passes = Passes(Costs(_TRIAL_S / 2, _TRIAL_S / 2, _TRIAL_S / 2).on(sequential(1)), dict.fromkeys(Kind, 0.0))
    layers = Layers(passes, 0, Kind.I)
    taken: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}

    def spent(kind: Kind, work: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = work()
        taken[kind].append(time.monotonic() - begin - _TRIAL_S)
        return result

    for _ in range(_TRIALS):
        output = spent(Kind.F, lambda: layers(torch.zeros(SHAPE, requires_grad=True)))
        gradient = torch.zeros(SHAPE)
        spent(Kind.I, lambda: torch.autograd.backward(output, gradient))  # noqa: B023
        spent(Kind.W, lambda: passes.run(Kind.W, 0))
    around = {kind: min(times) for kind, times in taken.items()}
    return around | {Kind.B: around[Kind.I]}
