"""Short climbs on one placement under one set of costs after another, which tell them apart."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.climb import Entry, race
from megatron.schedules.search.problem import Problem


class Trials:
    """Each starts from one microbatch after another, and from the shortest order that any found so far.

    Args:
        placement, microbatches: what is scheduled.
        limit: microbatches a rank may hold.
        rounds: of a climb, from each start.
    """

    def __init__(self, placement: Placement, microbatches: int, limit: float, rounds: float) -> None:
        self._placement, self._microbatches, self._limit, self._rounds = placement, microbatches, limit, rounds
        self._best: Schedule | None = None
        self._length = math.inf

    def makespan(self, costs: StageCosts) -> float:
        """How long a plan under ``costs`` is that a climb finds; infinite where nothing fits."""
        problem = Problem(self._placement, self._microbatches, costs)
        starts = [problem.order(each) for each in (self._best, None)]
        starts = [order for order in starts if problem.fits(order, self._limit)]
        if not starts:
            return math.inf
        (climb,), _ = race([Entry(problem, starts)], self._limit, self._rounds * len(starts) * problem.effort)
        if climb.makespan < self._length:
            self._best, self._length = replace(problem.schedule, order=problem.rows(climb.best)), climb.makespan
        return climb.makespan
