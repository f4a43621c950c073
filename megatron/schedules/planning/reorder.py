"""Reordering: run passes ahead of a base order where a rank would idle, without raising its peak memory.

A base order, such as a repeated building block, is right in its steady state and leaves gaps in warm-up and cool-down.
Here time is played through (:mod:`.play`): whenever a rank is free it takes the first pass of its remaining order that
is ready. A pass may overtake those before it only if the remaining order, followed as it stands, still keeps within the
rank's memory limit. What is left is therefore always a feasible order, so no choice can ever lead to a deadlock.

Read backwards in time a schedule is again a list of tasks with precedences, in which memory is taken where it used to
be given back. Playing it in both directions in turn (forward-backward improvement, Li and Willis 1992) closes the gaps
at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.play import EPSILON, play
from megatron.schedules.planning.progress import Progress, unheard
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import peaks, simulate
from megatron.schedules.planning.tasks import Tasks, tasks_of


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses.

    Args:
        window: how many of its remaining passes it looks at.
        defer_weights: take a ready F or I before a ready W that stands earlier, memory allowing.
        patience: idle rather than start a pass that would delay an earlier one, known to become ready, by more than
            this share of the pass's own duration.
        ends_only: keep the base order of each rank but for its cool-down, from its last forward on.
    """

    window: int = 16
    defer_weights: bool = True
    patience: float = 1.0
    ends_only: bool = False


def improve(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float],
    policies: Sequence[Policy],
    plays: int,
    progress: Progress = unheard,
) -> Schedule:
    """The best order found by playing ``schedule`` forward and backward in turn under each of ``policies``.

    Args:
        schedule: the base order.
        limits: the most each rank may hold, in microbatches; the base order's own peak, where that is larger.
        policies: tried one after the other, the likeliest first.
        plays: how many plays to spend. A policy that gains nothing more makes room for the next.
        progress: hears of every play.

    Never longer than the base order. Time is linear in the passes.
    """
    tasks, passes = tasks_of(schedule, costs)
    base = list(range(len(passes)))
    limits = [max(limit, own) for limit, own in zip(limits, peaks(schedule, costs), strict=True)]
    backwards = tasks.reversed()
    best_order, best = base, simulate(schedule, costs).makespan
    share = 1 / max(1, plays)
    for policy in policies:
        if plays < 1:
            break
        order, reached = play_under(tasks, base, limits, policy)
        plays -= 1
        progress(share)
        while True:
            if reached < best - EPSILON:
                best_order, best = order, reached
            if plays < 2:
                break
            backward, _ = play_under(backwards, tasks.turned(order), limits, policy)
            progress(share)
            again, length = play_under(tasks, tasks.turned(backward), limits, policy)
            progress(share)
            plays -= 2
            if length > reached - EPSILON:
                break
            order, reached = again, length
    return replace(schedule, order=tasks.rows(best_order, passes))


def play_under(tasks: Tasks, order: Sequence[int], limits: Sequence[float], policy: Policy) -> tuple[list[int], float]:
    """Play ``order`` through in time, overtaking as ``policy`` says; the new order and the makespan."""
    played = list(order)
    makespan = play(
        order,
        tasks.first,
        tasks.rank,
        tasks.duration,
        tasks.change,
        tasks.weight,
        tasks.steady if policy.ends_only else [False] * len(played),
        tasks.before.counts(),
        [0.0] * len(played),
        tasks.after.start,
        tasks.after.task,
        tasks.after.delay,
        limits,
        policy.window,
        policy.defer_weights,
        policy.patience,
        0.0,
        0,
        played,
    )
    return played, makespan
