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
from megatron.schedules.search.list_scheduling import EPSILON, NEVER, Policy, list_schedule, sound, space_for
from megatron.schedules.search.tasks import Tasks, tasks_of, whole
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
    base: Sequence[int] = range(len(passes))
    limits = [max(limit, own) for limit, own in zip(limits, peaks(schedule, costs), strict=True)]
    backwards = tasks.reversed()
    best_order = base
    share = 1 / max(1, rounds)
    for policy in policies:
        if rounds < 1:
            break
        order, reached = scheduled(tasks, base, limits, policy, compiled=compiled)
        rounds -= 1
        progress(share)
        while True:
            if reached < best - EPSILON:
                best_order, best = order, reached
            if rounds < 2:
                break
            backward, _ = scheduled(backwards, tasks.reversed_order(order), limits, policy, compiled=compiled)
            progress(share)
            again, length = scheduled(tasks, tasks.reversed_order(backward), limits, policy, compiled=compiled)
            progress(share)
            rounds -= 2
            if length > reached - EPSILON:
                break
            order, reached = again, length
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


def scheduled(
    tasks: Tasks, order: Sequence[int], limits: Sequence[float], policy: Policy, *, compiled: bool = False
) -> tuple[Sequence[int], float]:
    """The order that list scheduling makes of ``order`` under ``policy``, and its makespan.

    Both are the same where it is ``compiled``, which takes a second or two once and then next to nothing.

    Raises:
        ValueError: where the policy cannot be followed, or ``order`` does not keep within ``limits``.
    """
    if compiled:
        import numpy as np

        from megatron.schedules.search import compiled as machine_code

        numbers, makespan = machine_code.scheduled(tasks.arrays, np.asarray(order), limits, policy)
        return whole(numbers.tobytes()), makespan
    instance, found = tasks.instance, list(order)
    makespan = list_schedule(instance, order, limits, sound(policy), space_for(instance), found)
    if makespan >= NEVER:
        raise ValueError("the order cannot run within its limits")
    return found, makespan
