"""Passes that only sleep, for a known time: the same for every engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.stage_costs import StageCosts

SHAPE = (16, 1, 64)
"""Shape of every message: sequence, batch, hidden."""

Waits = Callable[[float, float], None]
"""Takes as many seconds as its first argument; its second argument says how many of them it waits for messages."""


def _asleep(seconds: float, message: float) -> None:
    time.sleep(seconds)


class Passes:
    """The passes of one schedule on one rank.

    Args:
        costs: their times in seconds.
        around: seconds that calling each kind takes besides, such as autograd's: so much less is slept. What would
            overlap with the work on a GPU.
    """

    def __init__(self, costs: StageCosts, around: dict[Kind, float]) -> None:
        self.costs, self.around = costs, around
        self.pace = 1.0
        """Times are multiplied by this: a warm-up need not last long."""
        self.waits: Waits = _asleep
        """Takes the time of a pass, of which it waits a part for messages of experts."""

    def seconds(self, kind: Kind, stage: int, microbatch: int = 0) -> float:
        """Returns the seconds of a pass; without lengths all microbatches are equal."""
        return self.costs.durations_of([Pass(stage, kind, microbatch)])[0]

    def run(self, kind: Kind, stage: int, microbatch: int = 0) -> None:
        """Sleeps for the pass's time."""
        (message,) = self.costs.messages_of([Pass(stage, kind, microbatch)])
        seconds = max(self.seconds(kind, stage, microbatch) * self.pace - self.around[kind], 0.0)
        self.waits(seconds, message * self.pace)

    def run_part(self, kind: Kind, stage: int, microbatch: int, share: float) -> None:
        """Sleeps for a part of the pass's time."""
        time.sleep(max(share * self.seconds(kind, stage, microbatch) * self.pace - self.around[kind], 0.0))

    def fill(self, kind: Kind, stage: int, begun: float) -> None:
        """Sleeps for what is left of the pass's time since ``begun``, by :func:`time.monotonic`."""
        time.sleep(max(begun + self.seconds(kind, stage) * self.pace - time.monotonic(), 0.0))


class Layers(nn.Module):
    """A stage for autograd: its forward is F, its backward B, or I where W is run separately."""

    def __init__(self, passes: Passes, stage: int, backward: Kind) -> None:
        super().__init__()
        self.passes, self.stage, self.kind = passes, stage, backward
        self.microbatch = 0
        """Whose pass comes next, where they differ."""
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeping.apply(x, self.weight, self)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layers: Layers) -> Tensor:
        ctx.layers = layers
        layers.passes.run(Kind.F, layers.stage, layers.microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.layers.passes.run(ctx.layers.kind, ctx.layers.stage, ctx.layers.microbatch)
        return gradient.clone(), torch.zeros(()), None
