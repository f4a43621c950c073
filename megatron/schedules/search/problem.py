"""Scheduling problem of one placement in compiled form: arrays, and list scheduling forward and backward in time."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.schedule.kinds import KINDS, SAVING, SPLIT, Doing, Kind, Pass, everywhere, in_dependency_order
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import fractions, tasks_of

TaskOrder = NDArray[np.int64]
"""Task numbers, rank by rank."""


class Problem:
    """All passes of ``microbatches`` on ``placement`` under its ``costs``, with every backward split."""

    def __init__(self, placement: Placement, microbatches: int, costs: StageCosts) -> None:
        self.schedule = one_by_one(placement, microbatches, costs.doing(placement))
        self.costs = costs
        tasks, self.passes = tasks_of(self.schedule, costs)
        self._tasks = tasks
        self._number = {work: index for index, work in enumerate(self.passes)}
        self.size = len(self.passes)
        self._rounds = Rounds(tasks, compiled=True)
        self._limits: dict[float, NDArray[np.float64]] = {}  # limits of each rank
        self._bounds: dict[float, float] = {}

    def under(self, costs: StageCosts) -> Problem | None:
        """Returns the same passes under other ``costs``, which is faster than a new problem.

        Returns None if the passes or messages differ under ``costs``.
        """
        own = self.costs
        if not own.links_as(costs) or own.doing(self.placement) != costs.doing(self.placement):
            return None
        n, other = self.schedule.microbatches, copy(self)
        # Each rank runs the same passes for every microbatch.
        rows = [row[: len(row) // n] for row in self.schedule.order]
        times, changes, messages = (
            np.concatenate([np.tile(of(row), n) for row in rows])
            for of in (costs.durations_of, costs.changes_of, costs.messages_of)
        )
        messages = messages[: self.size * costs.has_messages]  # none without messages
        other.costs, other._limits, other._bounds = costs, {}, {}
        other._tasks = replace(self._tasks, change=fractions(changes), message=fractions(messages))
        other._rounds = self._rounds.under(times, changes, messages)
        return other

    @property
    def effort(self) -> int:
        """Cost of one round, in passes: its passes, plus the overhead of the call expressed in passes."""
        return self.size + 200

    @property
    def placement(self) -> Placement:
        """Rank of each stage."""
        return self.schedule.placement

    @property
    def least(self) -> float:
        """Least memory limit with which a schedule exists here, in microbatches."""
        return self.costs.least(self.placement)

    def order(self, schedule: Schedule | None = None) -> TaskOrder:
        """Returns ``schedule`` on this placement as task numbers; without one, the order one microbatch after another.

        Splits every B. Adds or removes R, O and L passes to match this problem.
        """
        if schedule is None:
            return np.arange(self.size)
        passes = [work for _, work in schedule.passes()]
        there = set(passes)
        every = (part for work in passes for part in _with_saving(work, there))
        order = np.array([self._number[work] for work in every if work in self._number])
        return self._tasks.weights_in_turn(order) if self.costs.has_messages else order

    def taken_over(self, other: Problem, order: TaskOrder) -> TaskOrder:
        """Converts ``order`` of ``other``, a problem on the same placement, to this problem's task numbers."""
        if other.passes is self.passes:
            return order
        return self.order(replace(other.schedule, order=other.rows(order)))

    def rows(self, order: TaskOrder) -> tuple[tuple[Pass, ...], ...]:
        """Returns ``order`` as the rows of a schedule."""
        return self._tasks.rows(order, self.passes)

    def peaks(self, order: TaskOrder) -> list[float]:
        """Peak activation memory of each rank in ``order``, in microbatches.

        It is higher than with whole backwards where I leaves more memory allocated than F did.
        """
        first, change = self._tasks.first, np.asarray(self._tasks.change)
        return [float(np.cumsum(change[order[a:b]]).max()) for a, b in pairwise(first)]

    def fits(self, order: TaskOrder, limit: float) -> bool:
        """Checks that every rank keeps within ``limit`` in ``order``."""
        limits = self.costs.limits(self.placement, limit)
        return all(peak <= most + EPSILON for peak, most in zip(self.peaks(order), limits, strict=True))

    def settled(
        self,
        order: TaskOrder,
        limit: float,
        policy: Policy,
        *,
        backwards: bool = False,
        most: int = 0,
    ) -> tuple[TaskOrder, float, int]:
        """Runs rounds of list scheduling with ``limit`` microbatches a rank, see :meth:`.Rounds.settled`."""
        return self._rounds.settled(order, self.limits(limit), policy, backwards=backwards, most=most)

    @property
    def both(self) -> Both:
        """The tasks in both directions of time, in arrays."""
        both: Both = self._rounds.both
        return both

    def limits(self, limit: float) -> NDArray[np.float64]:
        """Memory limit of each rank if that of an average rank is ``limit``, in microbatches."""
        if limit not in self._limits:
            self._limits[limit] = np.array(self.costs.limits(self.placement, limit), dtype=np.float64)
        return self._limits[limit]

    def bound(self, limit: float) -> float:
        """Makespan that no order within ``limit`` can beat, see :func:`.lower_bound`."""
        if limit not in self._bounds:
            self._bounds[limit] = lower_bound(self.placement, self.schedule.microbatches, self.costs, limit)
        return self._bounds[limit]


def _with_saving(work: Pass, there: Collection[Pass]) -> list[Pass]:
    """Splits ``work`` and adds the R, O and L passes that go with it and are not ``there``.

    A pass that frees memory follows the forward directly. A pass that allocates memory directly precedes the pass that
    needs it.
    """
    stage, kind, m = work
    before, after = ([other for other in kinds if Pass(stage, other, m) not in there] for kinds in _SAVING_AROUND[kind])
    return [Pass(stage, other, m) for other in (*before, *(KINDS[kind].parts or (kind,)), *after)]


def _other_saving(kind: Kind) -> tuple[list[Kind], list[Kind]]:
    """Returns the R, O and L kinds that ``kind`` needs, and those that need ``kind`` and free memory."""
    needed = {other for part in KINDS[kind].parts or (kind,) for need in KINDS[part].needs for other in need.kinds}
    gives = [saver for saver in SAVING if KINDS[saver].gives]
    return (
        [saver for saver in SAVING if saver in needed],
        [saver for saver in gives if any(kind in need.kinds for need in KINDS[saver].needs)],
    )


_SAVING_AROUND = {kind: _other_saving(kind) for kind in KINDS}


def one_by_one(placement: Placement, microbatches: int, doing: Doing | None = None) -> Schedule:
    """Schedules one microbatch after another, forward then backward. It needs the least memory and is slow."""
    once = list(in_dependency_order(placement, doing or everywhere(placement, SPLIT)))
    rows = []
    for rank in range(placement.ranks):
        here = [work for work in once if placement.rank_of[work[0]] == rank]
        rows.append(tuple(Pass(stage, kind, m) for m in range(microbatches) for stage, kind in here))
    return Schedule("one by one", placement, microbatches, tuple(rows))
