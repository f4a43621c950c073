"""Short climbs on one placement under different costs, to compare those costs."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.climb import Entry, race
from megatron.schedules.search.problem import Problem, TaskOrder


class Trials:
    """Climbs that start from one microbatch after another, and from the best order of the previous climbs.

    Args:
        placement: the rank of each stage.
        microbatches: n.
        limit: memory limit, microbatches on an average rank.
        rounds: rounds of a climb from each start.
    """

    def __init__(self, placement: Placement, microbatches: int, limit: float, rounds: float) -> None:
        self._placement, self._microbatches, self._limit, self._rounds = placement, microbatches, limit, rounds
        self._problem: Problem | None = None
        self._best: tuple[Problem, TaskOrder] | None = None
        self._length = math.inf

    @property
    def schedule(self) -> Schedule | None:
        """Shortest schedule found, with every backward split; None if there is none."""
        if self._best is None:
            return None
        problem, order = self._best
        return replace(problem.schedule, name="adaptive", order=problem.rows(order))

    def makespan(self, costs: StageCosts) -> float:
        """Returns the makespan that a climb finds under ``costs``; infinite if nothing fits."""
        problem = self._problem and self._problem.under(costs)
        if problem is None:
            problem = self._problem = Problem(self._placement, self._microbatches, costs)
        one_by_one = problem.order()
        best = problem.taken_over(*self._best) if self._best else one_by_one
        starts = [order for order in (best, one_by_one) if problem.fits(order, self._limit)]
        if not starts:
            return math.inf
        (climb,), _ = race([Entry(problem, starts)], self._limit, self._rounds * len(starts) * problem.effort)
        if climb.makespan < self._length:
            self._best, self._length = (problem, climb.best), climb.makespan
        return climb.makespan
