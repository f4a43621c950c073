"""One placement's scheduling problem in compiled form: arrays, and list scheduling forward and backward in time."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.schedule.kinds import KINDS, SAVING, SPLIT, Doing, Kind, everywhere, in_dependency_order
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import fractions, tasks_of

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
        self._rounds = Rounds(tasks, compiled=True)
        self._limits: dict[float, NDArray[np.float64]] = {}  # of each rank

    def under(self, costs: StageCosts) -> Problem | None:
        """The same passes under other ``costs``, soon made; None where these have other passes or messages."""
        own = self.costs
        if any(getattr(own, part) != getattr(costs, part) for part in ("comm", "latencies", "one_way", "loads")):
            return None
        if own.doing(self.placement) != costs.doing(self.placement):
            return None
        n, other = self.schedule.microbatches, copy(self)
        # Each rank does the same passes of every microbatch.
        rows = [row[: len(row) // n] for row in self.schedule.order]
        times, changes = (
            np.concatenate([np.tile(of(row), n) for row in rows]) for of in (costs.durations_of, costs.changes_of)
        )
        other.costs, other._limits = costs, {}
        other._tasks = replace(self._tasks, change=fractions(changes))
        other._rounds = self._rounds.under(times, changes)
        return other

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
        """``schedule`` on this placement in task numbers; without one, one microbatch after another.

        Every B is split; R, O and L are added or left out as they are here.
        """
        if schedule is None:
            return np.arange(self.size)
        passes = [work for _, work in schedule.passes()]
        there = set(passes)
        every = (each for work in passes for each in _with_saving(work, there))
        return np.array([self._number[work] for work in every if work in self._number])

    def taken_over(self, other: Problem, order: TaskOrder) -> TaskOrder:
        """``order`` of ``other``, a problem on this placement, in this one's task numbers."""
        if other.passes is self.passes:
            return order
        return self.order(replace(other.schedule, order=other.rows(order)))

    def rows(self, order: TaskOrder) -> tuple[tuple[Pass, ...], ...]:
        """``order`` as a schedule's rows."""
        return self._tasks.rows(order, self.passes)

    def peaks(self, order: TaskOrder) -> list[float]:
        """What each rank holds in ``order``; more than with whole backwards, where I leaves more than F did."""
        first, change = self._tasks.first, np.asarray(self._tasks.change)
        return [float(np.cumsum(change[order[a:b]]).max()) for a, b in pairwise(first)]

    def fits(self, order: TaskOrder, limit: float) -> bool:
        """Whether no rank holds more in ``order`` than it may under ``limit``."""
        limits = self.costs.limits(self.placement, limit)
        return all(peak <= most + EPSILON for peak, most in zip(self.peaks(order), limits, strict=True))

    def settled(
        self,
        order: TaskOrder,
        limit: float,
        first: Policy,
        plain: Policy | None = None,
        *,
        backwards: bool = False,
        most: int = 0,
    ) -> tuple[TaskOrder, float, int]:
        """Rounds of list scheduling with ``limit`` microbatches on an average rank, see :meth:`.Rounds.settled`."""
        if limit not in self._limits:
            self._limits[limit] = np.array(self.costs.limits(self.placement, limit), dtype=np.float64)
        return self._rounds.settled(order, self._limits[limit], first, plain, backwards=backwards, most=most)


def _with_saving(work: Pass, there: Collection[Pass]) -> list[Pass]:
    """``work`` in parts, and next to it the R, O and L that might go with it and are not ``there``.

    What frees memory comes right after the forward, what allocates it right before the pass that needs it.
    """
    stage, kind, m = work
    before, after = ([each for each in kinds if Pass(stage, each, m) not in there] for kinds in _BESIDE[kind])
    return [Pass(stage, each, m) for each in (*before, *(KINDS[kind].parts or (kind,)), *after)]


def _other_saving(kind: Kind) -> tuple[list[Kind], list[Kind]]:
    """R, O and L that ``kind`` needs, and those that need it and free memory."""
    needed = {each for part in KINDS[kind].parts or (kind,) for need in KINDS[part].needs for each in need.kinds}
    gives = [each for each in SAVING if KINDS[each].gives]
    return (
        [each for each in SAVING if each in needed],
        [each for each in gives if any(kind in need.kinds for need in KINDS[each].needs)],
    )


_BESIDE = {kind: _other_saving(kind) for kind in KINDS}


def one_by_one(placement: Placement, microbatches: int, doing: Doing | None = None) -> Schedule:
    """One microbatch after another, forward and backward: the least memory there is, and no idea of an order."""
    once = list(in_dependency_order(placement, doing or everywhere(placement, SPLIT)))
    rows = []
    for rank in range(placement.ranks):
        here = [work for work in once if placement.rank_of[work[0]] == rank]
        rows.append(tuple(Pass(stage, kind, m) for m in range(microbatches) for stage, kind in here))
    return Schedule("one by one", placement, microbatches, tuple(rows))
