"""Reordering: run passes ahead of a base order where a rank would idle, without raising its peak memory.

A base order, such as a repeated building block, is right in its steady state and leaves gaps in warm-up and cool-down.
Here it is list-scheduled (:mod:`.list_scheduling`): whenever a rank is free it takes the first pass of its remaining
order that is ready and that memory allows.

Read backwards in time a schedule is again a list of tasks with precedences, in which memory is taken where it used to
be given back. Scheduling in both directions in turn (forward-backward improvement, Li and Willis 1992) closes the gaps
at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import tasks_of
from megatron.schedules.utils.progress import Progress, unheard

# Scheduling so many passes takes Python as long as it takes to compile what then schedules them in no time.
_MOST_INTERPRETED = 700_000
# Set within a search that makes so many plans that machine code pays; never outside.
_compiled: ContextVar[bool] = ContextVar("compiled", default=False)


def improve(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float],
    policies: Sequence[Policy],
    rounds: int,
    progress: Progress = unheard,
) -> Schedule:
    """The best order found by list scheduling, forward and backward in time in turn, under each of ``policies``.

    Args:
        schedule: the base order.
        limits: the most each rank may hold, in microbatches; the base order's own peak, where that is larger.
        policies: tried one after the other, the likeliest first.
        rounds: how many times to schedule. A policy that gains nothing more makes room for the next.
        progress: hears of every round.

    Never longer than the base order. Time is linear in the passes.
    """
    best = simulate(schedule, costs).makespan
    tasks, passes = tasks_of(schedule, costs)
    compiled = _compiled.get() or worth_compiling(rounds * len(passes))
    list_scheduling = Rounds(tasks, compiled=compiled)
    limits = [max(limit, own) for limit, own in zip(limits, peaks(schedule, costs), strict=True)]
    base = best_order = range(len(passes))
    left = rounds
    for policy in policies:
        if left < 1:
            break
        order, reached, taken = list_scheduling.settled(base, limits, policy, most=(left - 1) // 2)
        left -= taken
        progress(taken / rounds)
        if reached < best - EPSILON:
            best_order, best = order, reached
    return replace(schedule, order=tasks.rows(best_order, passes))


def worth_compiling(passes: float) -> bool:
    """Whether to schedule so many passes in machine code, all plans that are made together."""
    return passes > _MOST_INTERPRETED


@contextmanager
def many_plans(passes: float) -> Iterator[None]:
    """While the ``with`` block makes many plans that schedule so many ``passes`` together, each is made accordingly.

    A block that makes the same plans in another way would make them all the same: only the time differs.
    """
    before = _compiled.set(worth_compiling(passes))
    try:
        yield
    finally:
        _compiled.reset(before)
