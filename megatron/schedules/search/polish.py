"""Polishing: turns a base order into the final schedule, without a higher peak memory.

First every pass starts as early as the base order allows. Then warm-up and cool-down are reordered for the given costs,
within the memory limit. Last, each backward whose split has no use is joined into one pass (:mod:`.joining`).

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
from dataclasses import dataclass, replace

from megatron.schedules.schedule.kinds import KINDS, Pass
from megatron.schedules.schedule.schedule import Schedule, in_microbatch_order
from megatron.schedules.schedule.simulator import peaks, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.joining import joined
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.rounds import Rounds, pays_off, recosted
from megatron.schedules.search.tasks import Tasks, tasks_of
from megatron.schedules.utils.progress import Progress, unheard

# Scheduling a pass once takes about five microseconds. With this number a plan of usual size takes a second or two. A
# plan of any size is scheduled at least forward, backward and forward again, so the time is linear in its size.
_PASSES = 250_000
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 60


@dataclass
class _Plans:
    """Many plans.

    Args:
        compiled: whether they are so many that compiled code pays off.
        last: the base order that was compiled last, with its costs, tasks, passes and rounds.
    """

    compiled: bool
    last: tuple[Schedule, StageCosts, Tasks, Sequence[Pass], Rounds] | None = None


_plans: ContextVar[_Plans | None] = ContextVar("plans", default=None)


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
        limits: memory limit of each rank, in microbatches. A larger peak of the base order replaces it.
        policies: policies to try in turn, the most promising first.
        rounds: total rounds of list scheduling. The next policy starts when one gains nothing more.
        progress: is called after every policy.
    """
    best = simulate(schedule, costs).makespan
    tasks, passes, list_scheduling = _numbered(schedule, costs, rounds)
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
    improved = replace(schedule, order=tasks.rows(best_order, passes))
    if costs.has_messages and simulate(improved, costs).makespan > simulate(schedule, costs).makespan:
        return schedule  # rounds do not know that a B keeps later weight gradients from running behind messages
    return improved


def _numbered(schedule: Schedule, costs: StageCosts, rounds: int) -> tuple[Tasks, Sequence[Pass], Rounds]:
    """Returns the tasks of ``schedule``, their passes, and rounds for as many rounds.

    Among many plans those for the order of the last one, under costs that differ in time and memory only, are reused.
    """
    plans = _plans.get()
    if plans and plans.last:
        before, known, tasks, passes, made = plans.last
        if before.placement == schedule.placement and before.order == schedule.order and known.links_as(costs):
            return tasks, passes, recosted(made, schedule, costs)
    compiled = bool(plans and plans.compiled) or pays_off(rounds * sum(map(len, schedule.order)))
    tasks, passes = tasks_of(schedule, costs)
    made = Rounds(tasks, compiled=compiled)
    if plans and compiled:
        plans.last = schedule, costs, tasks, passes, made
    return tasks, passes, made


@contextmanager
def many_plans(passes: float) -> Iterator[None]:
    """Within the ``with`` block, makes plans with or without compiled code, as suits ``passes`` passes in total.

    The plans are the same either way; only the time differs.
    """
    before = _plans.set(_Plans(pays_off(passes)))
    try:
        yield
    finally:
        _plans.reset(before)


def polish(base: Schedule, costs: StageCosts, limit: float, progress: Progress = unheard) -> Schedule:
    """Compacts ``base``, reorders it within ``limit`` microbatches a rank, and joins backwards that need no split.

    Times are around 1, see :meth:`.costs.Costs.around_one`. If every rank keeps more of a microbatch than the
    activations of its layers, such as an attention mask, the limit is raised accordingly.
    """
    where = base.placement
    own = [sum(costs.activation[stage] for stage in where.stages_of(rank)) for rank in range(where.ranks)]
    return polished(base, costs, [limit * max(1.0, min(own))] * base.ranks, progress)


def polished(base: Schedule, costs: StageCosts, limits: Sequence[float], progress: Progress = unheard) -> Schedule:
    """Polishes ``base`` within a separate limit for each rank.

    Args:
        costs: costs with times around 1, see :meth:`.costs.Costs.around_one`.
        limits: memory limit of each rank, in microbatches.
        progress: is called after every policy.
    """
    # Passes of two microbatches per rank include all those that a rank could usefully run early.
    lookahead = max(16, 2 * base.ranks)
    policies = [Policy(lookahead, patience=patience) for patience in (0.0, 0.5, 1.0)]
    ends = Policy(lookahead, patience=0.0, ends_only=True)
    if any(KINDS[kind].filler for kind in base.kinds):
        policies += [Policy(lookahead, defer_fillers=True, patience=0.5), ends]
    else:  # without fillers, leave a tight steady state as it is
        policies.insert(0, ends)
    size = sum(map(len, base.order))
    rounds = max(_FEWEST_ROUNDS, min(_PASSES // size, _MOST_ROUNDS))
    return finished(improve(base, costs, limits, policies, rounds, progress), costs)


def finished(split: Schedule, costs: StageCosts) -> Schedule:
    """Returns the final schedule: microbatches in order, and no split backward without a use.

    If microbatches differ, they are in order already, see :func:`.tasks.tasks_of`.
    """
    return joined(in_microbatch_order(split) if costs.loads is None else split, costs)
