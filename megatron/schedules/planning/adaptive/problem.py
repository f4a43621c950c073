"""One placement's scheduling problem in compiled form: arrays, and plays of an order forward and backward in time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.planning.adaptive.compiled import compiled_play
from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.tasks import Links, Tasks, tasks_of

Order = NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """How a free rank chooses during one play; see :class:`..reorder.Policy` and :func:`..play.play`."""

    window: int
    defer_weights: bool = False
    patience: float = 1.0
    noise: float = 0.0
    seed: int = 0


class Problem:
    """All passes of ``microbatches`` on ``placement``, the backward split everywhere.

    Args:
        placement: where the stages live.
        microbatches: n.
        costs: of each stage of ``placement``.
    """

    def __init__(self, placement: Placement, microbatches: int, costs: StageCosts) -> None:
        self.schedule = one_by_one(placement, microbatches)
        self.costs = costs
        tasks, self.passes = tasks_of(self.schedule, costs)
        self._tasks = tasks
        self._number = {work: index for index, work in enumerate(self.passes)}
        self.size = len(self.passes)
        self._turned = np.array(tasks.turned(range(self.size)))
        self._forward, self._backward = _arrays(tasks), _arrays(tasks.reversed())

    @property
    def effort(self) -> int:
        """What one play counts for: its passes, and what calling it takes in the time of so many."""
        return self.size + 200

    @property
    def placement(self) -> Placement:
        """Where the stages live."""
        return self.schedule.placement

    @property
    def least(self) -> float:
        """The least memory in which anything runs here."""
        return self.costs.least(self.placement)

    def order(self, schedule: Schedule | None = None) -> Order:
        """``schedule`` on this placement in task numbers, every B split; without one, one microbatch after another."""
        if schedule is None:
            return np.arange(self.size)
        numbers = []
        for _, (stage, kind, m) in schedule.passes():
            kinds = (Kind.I, Kind.W) if kind is Kind.B else (kind,)
            numbers += [self._number[Pass(stage, each, m)] for each in kinds]
        return np.array(numbers)

    def rows(self, order: Order) -> tuple[tuple[Pass, ...], ...]:
        """``order`` as a schedule's rows."""
        return self._tasks.rows(order.tolist(), self.passes)

    def peak(self, order: Order) -> float:
        """What the worst rank holds in ``order``; more than with whole backwards, where I leaves more than F did."""
        first, _, _, change, *_ = self._forward.of_tasks
        return max(float(np.cumsum(change[order[a:b]]).max()) for a, b in pairwise(first.tolist()))

    def forward(self, order: Order, limit: float, choices: Choices) -> tuple[Order, float]:
        """Play ``order`` through in time with at most ``limit`` microbatches on a rank; new order and makespan.

        ``order`` itself must keep within ``limit``: it is what a rank falls back on.
        """
        return self._play(self._forward, order, limit, choices)

    def backward(self, order: Order, limit: float, choices: Choices) -> Order:
        """Play ``order`` from its end to its beginning: passes move towards the end."""
        turned, _ = self._play(self._backward, order[self._turned], limit, choices)
        return turned[self._turned]

    def _play(self, arrays: _Arrays, order: Order, limit: float, choices: Choices) -> tuple[Order, float]:
        played = np.empty_like(order)
        makespan = compiled_play()(
            order,
            *arrays.of_tasks,
            arrays.missing.copy(),
            np.zeros(self.size),
            *arrays.after,
            np.full(self.placement.ranks, limit, dtype=np.float64),
            choices.window,
            choices.defer_weights,
            choices.patience,
            choices.noise,
            choices.seed,
            played,
        )
        return played, makespan


@dataclass(frozen=True)
class _Arrays:
    """What a play takes besides the order and the choices; see :func:`..play.play`."""

    of_tasks: tuple[NDArray[Any], ...]
    missing: NDArray[np.int64]
    after: tuple[NDArray[Any], ...]


def _arrays(tasks: Tasks) -> _Arrays:
    size = len(tasks.rank)
    return _Arrays(
        of_tasks=(
            np.array(tasks.first, dtype=np.int64),
            np.array(tasks.rank, dtype=np.int64),
            np.array(tasks.duration, dtype=np.float64),
            np.array(tasks.change, dtype=np.float64),
            np.array(tasks.weight, dtype=np.bool_),
            np.zeros(size, dtype=np.bool_),
        ),
        missing=np.array(tasks.before.counts(), dtype=np.int64),
        after=_flat(tasks.after),
    )


def _flat(links: Links) -> tuple[NDArray[Any], ...]:
    start = np.array(links.start, dtype=np.int64)
    return start, np.array(links.task, dtype=np.int64), np.array(links.delay, dtype=np.float64)


def one_by_one(placement: Placement, microbatches: int) -> Schedule:
    """One microbatch after another, forward and backward: the least memory there is, and no idea of an order."""
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        one = [(stage, Kind.F) for stage in stages]
        one += [(stage, kind) for stage in reversed(stages) for kind in (Kind.I, Kind.W)]
        rows.append(tuple(Pass(stage, kind, m) for m in range(microbatches) for stage, kind in one))
    return Schedule("one by one", placement, microbatches, tuple(rows))
