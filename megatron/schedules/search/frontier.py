"""Frontier: the shortest schedule found for each of a ladder of memory limits, from the least to the requested one.

Each rung starts from the result of the rung below. Its search does not depend on the number of rungs above. So a larger
limit never gives a longer makespan.
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

# Number of rungs up to d microbatches, and the smallest step between them.
_RUNGS, _FINEST = 16, 0.5
# Messages of experts make more memory than 1F1B's useful: even steps go up to so many times it.
_EVEN_WITH_MESSAGES = 1.25
# Limits below a third of 1F1B's memory, and above all of it, are rarely requested: they get this share of a full
# effort.
_SELDOM = 0.25
# Share of a rung's effort for fresh starts. The rest goes to placements with a makespan up to _NEAR times the shortest.
_FRESH, _NEAR = 0.3, 1.03


@dataclass(frozen=True)
class _Searched:
    """An order that a search found. Its schedule is built on first use, which is slow for a large plan."""

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
    """Result for one memory limit.

    Args:
        limit: memory limit, in microbatches.
        best: shortest schedule found, a named one or one of the search.
        bound: lower bound of the makespan on the placements tried.
    """

    limit: float
    best: Timeline | _Searched
    bound: float

    @property
    def timeline(self) -> Timeline:
        """Shortest schedule found, with its times."""
        return self.best if isinstance(self.best, Timeline) else self.best.timeline


def ladder(
    ranks: int, microbatches: int, least: Sequence[float], named: Sequence[float], *, messages: bool = False
) -> list[float]:
    """Returns the limits to search, ascending: the least, even steps above it, and the limits of the named schedules.

    Args:
        ranks: pipeline ranks d.
        microbatches: n.
        least: memory of one microbatch on each placement, in microbatches.
        named: memory limit of each named schedule, in microbatches.
        messages: whether passes wait for messages of experts. A little more than 1F1B's memory then hides more of them.
    """
    step, lowest = max(_FINEST, ranks / _RUNGS), min(least)
    most = max(lowest, min(2 * ranks, microbatches * max(least)), *named)
    # Whole multiples, because users request those. Between two of them the result is that of the lower one.
    even = _EVEN_WITH_MESSAGES * ranks if messages else ranks
    limits = {step * k for k in range(math.ceil(lowest / step), math.ceil(even / step))}
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
    """Returns the rungs from the least limit to the largest one not above ``up_to``.

    Args:
        problems: placements to search, the most promising first.
        named: named schedules under the same costs. The result is never longer than these.
        up_to: memory limit, in microbatches.
        budget: tasks to schedule for all rungs up to 1F1B's memory.
        progress: receives the progress of the search.
        seed: random seed of all climbs.
        alone: search only ``up_to``, with the whole budget. Used if other limits have other problems.
    """
    placed = {problem.placement: problem.costs for problem in problems}
    placed |= {timeline.schedule.placement: timeline.costs for timeline in named}
    ranks, n = problems[0].placement.ranks, problems[0].schedule.microbatches
    least, of_named = [problem.least for problem in problems], [timeline.limit for timeline in named]
    messages = any(problem.costs.has_messages for problem in problems)
    limits = ladder(ranks, n, least, of_named, messages=messages)
    if alone:
        limits = [up_to]
    share = {limit: _SELDOM if not ranks / 3 <= limit <= ranks else 1.0 for limit in limits}
    full = budget / sum(share[limit] for limit in limits if limit <= max(ranks, limits[0]))
    asked = [limit for limit in limits if limit <= up_to + EPSILON]
    work = full * sum(share[limit] for limit in asked)
    best: Timeline | _Searched | None = None
    climbs_of: dict[int, list[Climb]] = {}  # by placement, shortest first
    rungs: list[Rung] = []
    below = -math.inf
    for limit in asked:
        fits = [(index, problem) for index, problem in enumerate(problems) if problem.least <= limit + EPSILON]
        new = [timeline for timeline in named if below < timeline.limit <= limit + EPSILON]
        best = min([*([best] if best else []), *new], key=lambda plan: plan.makespan, default=None)
        bound = min(lower_bound(placement, n, costs, limit) for placement, costs in placed.items())
        spend = full * share[limit]
        progress(spend / work)
        if best is None or best.makespan > bound + EPSILON:  # otherwise the best is optimal
            fresh, spent = race([Entry(problem, [problem.order()]) for _, problem in fits], limit, spend * _FRESH, seed)
            for (index, _), climb in zip(fits, fresh, strict=True):
                climbs_of[index] = sorted([*climbs_of.get(index, [])[:1], climb], key=_makespan)
            shortest = min(climbs_of[index][0].makespan for index, _ in fits)
            near = [(index, problem) for index, problem in fits if climbs_of[index][0].makespan <= _NEAR * shortest]
            entries = []
            for index, problem in near:
                named_here = [problem.order(x.schedule) for x in new if x.schedule.placement == problem.placement]
                known = [order for order in named_here if problem.fits(order, limit)]
                entries.append(Entry(problem, [*(climb.best for climb in climbs_of[index]), *known]))
            climbs, _ = race(entries, limit, spend - spent, seed)
            for (index, problem), climb in zip(near, climbs, strict=True):
                first = min(climb, *climbs_of[index], key=_makespan)
                climbs_of[index] = [first]
                if best is None or first.makespan < best.makespan - EPSILON:
                    best = _Searched(problem, first.best, first.makespan)
        assert best is not None
        rungs.append(Rung(limit, best, bound))
        below = limit + EPSILON
    return rungs


def _makespan(climb: Climb) -> float:
    return climb.makespan
