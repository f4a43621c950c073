"""One placement's scheduling problem in compiled form: arrays, and list scheduling forward and backward in time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.planning.adaptive.compiled import compiled
from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.kinds import KINDS, SPLIT, Doing, everywhere, in_dependency_order
from megatron.schedules.planning.list_scheduling import EPSILON, Instance, Policy
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.tasks import Tasks, tasks_of

TaskOrder = NDArray[np.int64]
"""Task numbers, rank by rank."""


class Problem:
    """All passes of ``microbatches`` on ``placement``, the backward split everywhere.

    Args:
        placement: where the stages live.
        microbatches: n.
        costs: of each stage of ``placement``.
    """

    def __init__(self, placement: Placement, microbatches: int, costs: StageCosts) -> None:
        self.schedule = one_by_one(placement, microbatches, costs.doing(placement))
        self.costs = costs
        tasks, self.passes = tasks_of(self.schedule, costs)
        self._tasks = tasks
        self._number = {work: index for index, work in enumerate(self.passes)}
        self.size = len(self.passes)
        self._reversed = np.array(tasks.reversed_order(range(self.size)))
        self._forward, self._backward = _arrays(tasks), _arrays(tasks.reversed())
        self._limits: dict[float, NDArray[np.float64]] = {}  # of each rank

    @property
    def effort(self) -> int:
        """What one round counts for: its passes, and what calling it takes in the time of so many."""
        return self.size + 200

    @property
    def placement(self) -> Placement:
        """Where the stages live."""
        return self.schedule.placement

    @property
    def least(self) -> float:
        """The least memory in which anything runs here."""
        return self.costs.least(self.placement)

    def order(self, schedule: Schedule | None = None) -> TaskOrder:
        """``schedule`` on this placement in task numbers, every B split; without one, one microbatch after another."""
        if schedule is None:
            return np.arange(self.size)
        numbers = []
        for _, (stage, kind, m) in schedule.passes():
            numbers += [self._number[Pass(stage, each, m)] for each in KINDS[kind].parts or (kind,)]
        return np.array(numbers)

    def rows(self, order: TaskOrder) -> tuple[tuple[Pass, ...], ...]:
        """``order`` as a schedule's rows."""
        return self._tasks.rows(order.tolist(), self.passes)

    def peaks(self, order: TaskOrder) -> list[float]:
        """What each rank holds in ``order``; more than with whole backwards, where I leaves more than F did."""
        first, change = np.asarray(self._forward.first), np.asarray(self._forward.change)
        return [float(np.cumsum(change[order[a:b]]).max()) for a, b in pairwise(first.tolist())]

    def fits(self, order: TaskOrder, limit: float) -> bool:
        """Whether no rank holds more in ``order`` than it may under ``limit``."""
        limits = self.costs.limits(self.placement, limit)
        return all(peak <= most + EPSILON for peak, most in zip(self.peaks(order), limits, strict=True))

    def forward(self, order: TaskOrder, limit: float, policy: Policy) -> tuple[TaskOrder, float]:
        """A round of list scheduling of ``order`` with ``limit`` microbatches on an average rank; order and makespan.

        ``order`` itself must keep within ``limit``: it is what a rank falls back on.
        """
        return self._round(self._forward, order, limit, policy)

    def backward(self, order: TaskOrder, limit: float, policy: Policy) -> TaskOrder:
        """The same from the end of ``order`` to its beginning: passes move towards the end."""
        found, _ = self._round(self._backward, order[self._reversed], limit, policy)
        return found[self._reversed]

    def _round(self, instance: Instance, order: TaskOrder, limit: float, policy: Policy) -> tuple[TaskOrder, float]:
        found, missing = np.empty_like(order), np.array(instance.waits)
        if limit not in self._limits:
            self._limits[limit] = np.array(self.costs.limits(self.placement, limit), dtype=np.float64)
        makespan = compiled()(instance, order, self._limits[limit], policy, missing, np.zeros(self.size), found)
        return found, makespan


def _arrays(tasks: Tasks) -> Instance:
    """What the compiled function takes; see :func:`.compiled.compiled`."""
    floats, flags = ("duration", "change", "delay"), ("filler", "steady")
    types = (
        dict.fromkeys(Instance._fields, np.int64) | dict.fromkeys(floats, np.float64) | dict.fromkeys(flags, np.bool_)
    )
    arrays: dict[str, Any] = {name: np.array(each, types[name]) for name, each in tasks.instance._asdict().items()}
    return Instance(**arrays)


def one_by_one(placement: Placement, microbatches: int, doing: Doing | None = None) -> Schedule:
    """One microbatch after another, forward and backward: the least memory there is, and no idea of an order."""
    once = list(in_dependency_order(placement, doing or everywhere(placement, SPLIT)))
    rows = []
    for rank in range(placement.ranks):
        here = [work for work in once if placement.rank_of[work[0]] == rank]
        rows.append(tuple(Pass(stage, kind, m) for m in range(microbatches) for stage, kind in here))
    return Schedule("one by one", placement, microbatches, tuple(rows))
