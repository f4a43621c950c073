"""The frontier: the shortest schedule found for each of a ladder of memory limits, from the least to the one asked for.

Each rung starts from what the one below it found, and its search does not depend on how far up the ladder goes. So a
larger limit never gives a longer makespan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.climb import Climb, Entry, race
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.polish import finished
from megatron.schedules.search.problem import Problem, TaskOrder
from megatron.schedules.utils.progress import Progress, unheard

# Rungs to a pipeline's own d microbatches, and the finest step between them.
_RUNGS, _FINEST = 16, 0.5
# Below a third of 1F1B's memory, and above all of it, little is asked for: such a rung gets this share of a full one.
_SELDOM = 0.25
# This share of a rung's effort goes to fresh starts; the rest to placements whose result is at most so much longer.
_FRESH, _NEAR = 0.3, 1.03


@dataclass(frozen=True)
class _Searched:
    """An order that a search found; its schedule is made when asked for, which for a large plan takes its time."""

    problem: Problem
    order: TaskOrder
    makespan: float

    @cached_property
    def schedule(self) -> Schedule:
        split = replace(self.problem.schedule, name="adaptive", order=self.problem.rows(self.order))
        return finished(split, self.problem.costs)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.problem.costs)


@dataclass(frozen=True)
class Rung:
    """What was found for one memory limit.

    Args:
        limit: microbatches a rank may hold.
        best: the shortest schedule found: one by name, or one of the search's.
        bound: no schedule on the placements tried ends before this.
    """

    limit: float
    best: Timeline | _Searched
    bound: float

    @property
    def timeline(self) -> Timeline:
        """The shortest schedule found, with its times."""
        return self.best if isinstance(self.best, Timeline) else self.best.timeline


def ladder(ranks: int, microbatches: int, least: Sequence[float], named: Sequence[float]) -> list[float]:
    """The limits that are searched, ascending: the least, even steps from there on, and what the named schedules hold.

    Args:
        ranks, microbatches: d and n.
        least: what one microbatch holds on each of the placements.
        named: what each named schedule holds.
    """
    step, lowest = max(_FINEST, ranks / _RUNGS), min(least)
    most = max(lowest, min(2 * ranks, microbatches * max(least)), *named)
    # Whole multiples: people ask for such, and between two of them all that is found is that for the lower one.
    limits = {step * k for k in range(math.ceil(lowest / step), math.ceil(ranks / step))}
    limits |= {*least, float(ranks), 1.25 * ranks, 1.5 * ranks, most, *named}
    return sorted(limit for limit in limits if lowest <= limit <= most)


def frontier(
    problems: Sequence[Problem],
    named: Sequence[Timeline],
    up_to: float,
    budget: float,
    progress: Progress = unheard,
    *,
    alone: bool = False,
    seed: int = 0,
) -> list[Rung]:
    """The rungs from the least limit to the largest that is not above ``up_to``.

    Args:
        problems: the placements to search on, the likeliest first.
        named: schedules by name under the same costs, which the result must not lose to.
        up_to: microbatches a rank may hold.
        budget: tasks to schedule for the whole ladder to 1F1B's memory.
        progress: hears how far the search is.
        seed: of all climbs; another one gives another search.
        alone: search for ``up_to`` alone, with all of the budget: where other limits have other problems.
    """
    placed = {problem.placement: problem.costs for problem in problems}
    placed |= {timeline.schedule.placement: timeline.costs for timeline in named}
    ranks, n = problems[0].placement.ranks, problems[0].schedule.microbatches
    limits = ladder(ranks, n, [problem.least for problem in problems], [timeline.limit for timeline in named])
    if alone:
        limits = [up_to]
    share = {limit: _SELDOM if not ranks / 3 <= limit <= ranks else 1.0 for limit in limits}
    full = budget / sum(share[limit] for limit in limits if limit <= max(ranks, limits[0]))
    asked = [limit for limit in limits if limit <= up_to + EPSILON]
    work = full * sum(share[limit] for limit in asked)
    best: Timeline | _Searched | None = None
    found: dict[int, list[Climb]] = {}  # by placement, the shortest first
    rungs: list[Rung] = []
    below = -math.inf
    for limit in asked:
        fits = [(index, problem) for index, problem in enumerate(problems) if problem.least <= limit + EPSILON]
        new = [timeline for timeline in named if below < timeline.limit <= limit + EPSILON]
        best = min([*([best] if best else []), *new], key=lambda found: found.makespan, default=None)
        bound = min(lower_bound(placement, n, costs, limit) for placement, costs in placed.items())
        spend = full * share[limit]
        progress(spend / work)
        if best is None or best.makespan > bound + EPSILON:  # else nothing is left to find
            fresh, spent = race([Entry(problem, [problem.order()]) for _, problem in fits], limit, spend * _FRESH, seed)
            for (index, _), climb in zip(fits, fresh, strict=True):
                found[index] = sorted([*found.get(index, [])[:1], climb], key=_makespan)
            shortest = min(found[index][0].makespan for index, _ in fits)
            near = [(index, problem) for index, problem in fits if found[index][0].makespan <= _NEAR * shortest]
            entries = []
            for index, problem in near:
                named_here = [problem.order(x.schedule) for x in new if x.schedule.placement == problem.placement]
                known = [order for order in named_here if problem.fits(order, limit)]
                entries.append(Entry(problem, [*(climb.best for climb in found[index]), *known]))
            climbs, _ = race(entries, limit, spend - spent, seed)
            for (index, problem), climb in zip(near, climbs, strict=True):
                first = min(climb, *found[index], key=_makespan)
                found[index] = [first]
                if best is None or first.makespan < best.makespan - EPSILON:
                    best = _Searched(problem, first.best, first.makespan)
        assert best is not None
        rungs.append(Rung(limit, best, bound))
        below = limit + EPSILON
    return rungs


def _makespan(climb: Climb) -> float:
    return climb.makespan
