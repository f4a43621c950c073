"""Reordering: run passes ahead of a base order where a rank would idle, without raising its peak memory.

A base order, such as a repeated building block, is right in its steady state and leaves gaps in warm-up and cool-down.
Here time is played through: whenever a rank is free it takes the first pass of its remaining order that is ready. A
pass may overtake those before it only if the remaining order, followed as it stands, still keeps within the rank's
memory limit. What is left is therefore always a feasible order, so no choice can ever lead to a deadlock.

Read backwards in time a schedule is again a list of tasks with precedences, in which memory is taken where it used to
be given back. Playing it in both directions in turn (forward-backward improvement, Li and Willis 1992) closes the gaps
at both ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import peaks, simulate

_EPSILON = 1e-9
_NEVER = float("inf")

Rows = tuple[tuple[int, ...], ...]


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


@dataclass(frozen=True)
class Tasks:
    """A schedule as numbered tasks: the plain form both directions of time share.

    Args:
        rows: for each rank its task numbers in the base order.
        rank, duration: of each task.
        change: of each task, the activation memory it takes (from its start) or, negative, gives back (at its end).
        weight: whether the task is a W.
        steady: whether the task stands before its rank's last forward.
        before, after: for each task the tasks it waits for and those that wait for it, each with the delay between.
    """

    rows: Rows
    rank: tuple[int, ...]
    duration: tuple[float, ...]
    change: tuple[float, ...]
    weight: tuple[bool, ...]
    steady: tuple[bool, ...]
    before: tuple[tuple[tuple[int, float], ...], ...]
    after: tuple[tuple[tuple[int, float], ...], ...]

    def reversed(self) -> Tasks:
        """The same tasks with time running backwards."""
        rows = tuple(row[::-1] for row in self.rows)
        change = tuple(-c for c in self.change)
        return replace(self, rows=rows, change=change, before=self.after, after=self.before)


def tasks_of(schedule: Schedule, costs: StageCosts) -> tuple[Tasks, list[Pass]]:
    """Number the passes of ``schedule``; also the pass of each number."""
    passes = [work for _, work in schedule.passes()]
    number = {work: index for index, work in enumerate(passes)}
    rank_of, last = schedule.placement.rank_of, schedule.placement.last_stage
    durations = costs.durations
    before: list[list[tuple[int, float]]] = [[] for _ in passes]
    after: list[list[tuple[int, float]]] = [[] for _ in passes]

    def wait(index: int, work: Pass) -> None:
        source = number.get(work)
        if source is None:  # the backward may be whole or split
            source = number[Pass(work.stage, Kind.B, work.microbatch)]
        hop = costs.comm if rank_of[work.stage] != rank_of[passes[index].stage] else 0.0
        before[index].append((source, hop))
        after[source].append((index, hop))

    for index, (stage, kind, m) in enumerate(passes):
        if kind is Kind.F:
            if stage:
                wait(index, Pass(stage - 1, Kind.F, m))
        elif kind is Kind.W:
            wait(index, Pass(stage, Kind.I, m))
        else:
            wait(index, Pass(stage, Kind.F, m))
            if stage < last:
                wait(index, Pass(stage + 1, Kind.I, m))
    rows: list[tuple[int, ...]] = []
    steady: list[bool] = []
    for row in schedule.order:
        rows.append(tuple(range(len(steady), len(steady) + len(row))))
        last_forward = max((place for place, work in enumerate(row) if work.kind is Kind.F), default=0)
        steady += [place < last_forward for place in range(len(row))]
    sign = {Kind.F: 1.0, Kind.I: 0.0, Kind.W: -1.0, Kind.B: -1.0}
    tasks = Tasks(
        rows=tuple(rows),
        rank=tuple(rank_of[work.stage] for work in passes),
        duration=tuple(durations[work.kind][work.stage] for work in passes),
        change=tuple(sign[work.kind] * costs.activation[work.stage] for work in passes),
        weight=tuple(work.kind is Kind.W for work in passes),
        steady=tuple(steady),
        before=tuple(map(tuple, before)),
        after=tuple(map(tuple, after)),
    )
    return tasks, passes


def improve(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float],
    policies: Sequence[Policy],
    plays: int,
) -> Schedule:
    """The best order found by playing ``schedule`` forward and backward in turn under each of ``policies``.

    Args:
        schedule: the base order.
        limits: the most each rank may hold, in microbatches; the base order's own peak, where that is larger.
        policies: tried one after the other, the likeliest first.
        plays: how many plays to spend. A policy that gains nothing more makes room for the next.

    Never longer than the base order. Time is linear in the passes.
    """
    tasks, passes = tasks_of(schedule, costs)
    limits = [max(limit, own) for limit, own in zip(limits, peaks(schedule, costs), strict=True)]
    best_rows, best = tasks.rows, simulate(schedule, costs).makespan
    for policy in policies:
        if plays < 1:
            break
        rows, reached = play(tasks, limits, policy)
        plays -= 1
        while True:
            if reached < best - _EPSILON:
                best_rows, best = rows, reached
            if plays < 2:
                break
            backward, _ = play(replace(tasks, rows=rows).reversed(), limits, policy)
            again, length = play(replace(tasks, rows=tuple(row[::-1] for row in backward)), limits, policy)
            plays -= 2
            if length > reached - _EPSILON:
                break
            rows, reached = again, length
    return replace(schedule, order=tuple(tuple(passes[index] for index in row) for row in best_rows))


def play(tasks: Tasks, limits: Sequence[float], policy: Policy) -> tuple[Rows, float]:
    """Play ``tasks`` through in time, overtaking as ``policy`` says; the new rows and the makespan."""
    held = [0.0] * len(tasks.rows)
    free_at = [0.0] * len(tasks.rows)
    done: list[list[int]] = [[] for _ in tasks.rows]
    missing = [len(sources) for sources in tasks.before]
    ready = [0.0] * len(missing)
    duration, change, weight = tasks.duration, tasks.change, tasks.weight
    head, following, preceding = _linked(tasks.rows, len(missing))
    impatience = 1 - policy.patience
    fixed = tasks.steady if policy.ends_only else (False,) * len(missing)

    def choose(rank: int, now: float) -> tuple[int, float]:
        """The task to start now, or -1 and when to look again (infinity: when something arrives)."""
        limit, level, soon = limits[rank] + _EPSILON, held[rank], now + _EPSILON
        highest, awaited, spare = level, _NEVER, -1
        index, looked = head[rank], 0
        while index >= 0 and looked < policy.window:
            takes = change[index]
            if not missing[index]:
                if ready[index] > soon:
                    if ready[index] < awaited:
                        awaited = ready[index]
                elif takes <= 0 or highest + takes <= limit:
                    if weight[index] and policy.defer_weights:
                        if spare < 0:
                            spare = index
                    elif soon + impatience * duration[index] <= awaited + 2 * _EPSILON:
                        return index, now
            if fixed[index]:
                break
            level += takes
            if level > highest:
                highest = level
            index = following[index]
            looked += 1
        if spare >= 0 and soon + impatience * duration[spare] <= awaited + 2 * _EPSILON:
            return spare, now
        return -1, awaited

    events = [(0.0, rank) for rank in range(len(held))]
    while events:
        now, rank = heapq.heappop(events)
        if now + _EPSILON < free_at[rank]:
            continue
        index, again = choose(rank, now)
        if index < 0:
            if again < _NEVER:
                heapq.heappush(events, (again, rank))
            continue
        end = free_at[rank] = now + duration[index]
        held[rank] += change[index]
        left, right = preceding[index], following[index]
        if left < 0:
            head[rank] = right
        else:
            following[left] = right
        if right >= 0:
            preceding[right] = left
        done[rank].append(index)
        heapq.heappush(events, (end, rank))
        for follower, hop in tasks.after[index]:
            missing[follower] -= 1
            if end + hop > ready[follower]:
                ready[follower] = end + hop
            other = tasks.rank[follower]
            if not missing[follower] and other != rank:
                heapq.heappush(events, (max(ready[follower], free_at[other]), other))
    assert max(head) < 0, "the base order cannot finish"
    return tuple(map(tuple, done)), max(free_at)


def _linked(rows: Sequence[Sequence[int]], size: int) -> tuple[list[int], list[int], list[int]]:
    """The rows as linked lists, where removing a task takes constant time: first, next, previous (-1: none)."""
    following, preceding = [-1] * size, [-1] * size
    for row in rows:
        for left, right in pairwise(row):
            following[left], preceding[right] = right, left
    return [row[0] if row else -1 for row in rows], following, preceding
