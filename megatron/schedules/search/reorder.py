"""Reordering: runs passes of a base order early where a rank would idle, without a higher peak memory.

A base order, such as a repeated building block, is good in its steady state and has gaps in warm-up and cool-down.
List scheduling (:mod:`.list_scheduling`) closes them: a free rank starts the first pass of its remaining order that is
ready and that memory allows.

With time reversed, a schedule is again a list of tasks with precedences, which allocate memory where the original ones
free it. Scheduling in both directions in turn (forward-backward improvement, Li and Willis 1992) closes the gaps at
both ends.
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

# Number of passes that Python schedules in the time that compiling takes. Compiled code needs almost no time for them.
_MOST_INTERPRETED = 700_000
# True within a search that makes enough plans for compiled code to pay off.
_compiled: ContextVar[bool] = ContextVar("compiled", default=False)


def improve(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float],
    policies: Sequence[Policy],
    rounds: int,
    progress: Progress = unheard,
) -> Schedule:
    """Returns the best order that list scheduling finds, forward and backward in turn, under each of ``policies``.

    It is never longer than the base order. The time is linear in the number of passes.

    Args:
        schedule: the base order.
        costs: costs of each stage.
        limits: memory limit of each rank, in microbatches. A larger peak of the base order replaces it.
        policies: policies to try in turn, the most promising first.
        rounds: total rounds of list scheduling. The next policy starts when one gains nothing more.
        progress: is called after every policy.
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
    found = replace(schedule, order=tasks.rows(best_order, passes))
    if costs.has_messages and simulate(found, costs).makespan > simulate(schedule, costs).makespan:
        return schedule  # rounds do not know that a B keeps later weight gradients from running behind messages
    return found


def worth_compiling(passes: float) -> bool:
    """Checks whether compiled code pays off to schedule ``passes`` passes, in all plans together."""
    return passes > _MOST_INTERPRETED


@contextmanager
def many_plans(passes: float) -> Iterator[None]:
    """Within the ``with`` block, makes plans with or without compiled code, as suits ``passes`` passes in total.

    The plans are the same either way; only the time differs.
    """
    before = _compiled.set(worth_compiling(passes))
    try:
        yield
    finally:
        _compiled.reset(before)
