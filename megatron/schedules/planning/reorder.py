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

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import peaks

_EPSILON = 1e-9


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses.

    Args:
        window: how many of its remaining passes it looks at.
        defer_weights: take a ready F or I before a ready W that stands earlier, memory allowing.
        patience: idle rather than start a pass that would delay an earlier one, known to become ready, by more than
            this share of the pass's own duration.
    """

    window: int = 16
    defer_weights: bool = True
    patience: float = 1.0


@dataclass(frozen=True)
class Tasks:
    """A schedule as numbered tasks: the plain form both directions of time share.

    Args:
        rows: for each rank its task numbers in the base order.
        rank, duration: of each task.
        change: of each task, the activation memory it takes (from its start) or, negative, gives back (at its end).
        weight: whether the task is a W.
        before, after: for each task the tasks it waits for and those that wait for it, each with the delay between.
    """

    rows: tuple[tuple[int, ...], ...]
    rank: tuple[int, ...]
    duration: tuple[float, ...]
    change: tuple[float, ...]
    weight: tuple[bool, ...]
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
    rows, first = [], 0
    for row in schedule.order:
        rows.append(tuple(range(first, first + len(row))))
        first += len(row)
    sign = {Kind.F: 1.0, Kind.I: 0.0, Kind.W: -1.0, Kind.B: -1.0}
    tasks = Tasks(
        rows=tuple(rows),
        rank=tuple(rank_of[work.stage] for work in passes),
        duration=tuple(durations[work.kind][work.stage] for work in passes),
        change=tuple(sign[work.kind] * costs.activation[work.stage] for work in passes),
        weight=tuple(work.kind is Kind.W for work in passes),
        before=tuple(map(tuple, before)),
        after=tuple(map(tuple, after)),
    )
    return tasks, passes


def improve(
    schedule: Schedule,
    costs: StageCosts,
    limits: Sequence[float],
    policies: Sequence[Policy],
    rounds: int = 3,
) -> Schedule:
    """The best order found by playing ``schedule`` forward and backward in turn under each of ``policies``.

    Args:
        schedule: the base order.
        limits: the most each rank may hold, in microbatches; the base order's own peak, where that is larger.
        rounds: plays in each direction for each policy; it ends earlier when a round gains nothing.

    Never longer than the base order. Time is linear in the passes.
    """
    tasks, passes = tasks_of(schedule, costs)
    limits = [max(limit, own) for limit, own in zip(limits, peaks(schedule, costs), strict=True)]
    best_rows, best = tasks.rows, span(tasks)
    for policy in policies:
        rows, reached = tasks.rows, float("inf")
        for _ in range(rounds):
            backward = play(
                replace(tasks, rows=play(replace(tasks, rows=rows), limits, policy)).reversed(), limits, policy
            )
            rows = tuple(row[::-1] for row in backward)
            forward = play(replace(tasks, rows=rows), limits, policy)
            for candidate in (rows, forward):
                length = span(replace(tasks, rows=candidate))
                if length < best - _EPSILON:
                    best_rows, best = candidate, length
            length = span(replace(tasks, rows=forward))
            rows = forward
            if length > reached - _EPSILON:
                break
            reached = length
    return replace(schedule, order=tuple(tuple(passes[index] for index in row) for row in best_rows))


def span(tasks: Tasks) -> float:
    """The makespan of ``tasks`` in the order of their rows (which must be feasible)."""
    end = [-1.0] * len(tasks.rank)
    position = [0] * len(tasks.rows)
    clock = [0.0] * len(tasks.rows)
    blocked: dict[int, int] = {}
    ready = list(range(len(tasks.rows)))
    while ready:
        rank = ready.pop()
        row, at, now = tasks.rows[rank], position[rank], clock[rank]
        while at < len(row):
            index = row[at]
            start = now
            for source, hop in tasks.before[index]:
                if end[source] < 0:
                    blocked[source] = rank
                    break
                start = max(start, end[source] + hop)
            else:
                now = end[index] = start + tasks.duration[index]
                at += 1
                if index in blocked:
                    ready.append(blocked.pop(index))
                continue
            break
        position[rank], clock[rank] = at, now
    assert all(at == len(row) for at, row in zip(position, tasks.rows, strict=True)), "the order cannot finish"
    return max(clock)


def play(tasks: Tasks, limits: Sequence[float], policy: Policy) -> tuple[tuple[int, ...], ...]:
    """Play ``tasks`` through in time, overtaking as ``policy`` says; the new rows."""
    left = [_Remaining(row) for row in tasks.rows]
    held = [0.0] * len(left)
    free_at = [0.0] * len(left)
    done: list[list[int]] = [[] for _ in left]
    missing = [len(sources) for sources in tasks.before]
    ready = [0.0] * len(missing)
    duration, change, weight = tasks.duration, tasks.change, tasks.weight

    def choose(rank: int, now: float) -> tuple[int, float]:
        """The task to start now, or -1 and when to look again (infinity: when something arrives)."""
        limit, level = limits[rank] + _EPSILON, held[rank]
        highest, awaited, spare = level, float("inf"), -1
        for index in left[rank].window(policy.window):
            takes = change[index]
            if not missing[index]:
                if ready[index] > now + _EPSILON:
                    awaited = min(awaited, ready[index])
                elif takes <= 0 or highest + takes <= limit:
                    if policy.defer_weights and weight[index] and spare < 0:
                        spare = index
                    elif now + (1 - policy.patience) * duration[index] <= awaited + _EPSILON:
                        return index, now
            level += takes
            highest = max(highest, level)
        if spare >= 0 and now + (1 - policy.patience) * duration[spare] <= awaited + _EPSILON:
            return spare, now
        return -1, awaited

    events = [(0.0, rank) for rank in range(len(left))]
    while events:
        now, rank = heapq.heappop(events)
        if now + _EPSILON < free_at[rank]:
            continue
        index, again = choose(rank, now)
        if index < 0:
            if again < float("inf"):
                heapq.heappush(events, (again, rank))
            continue
        end = free_at[rank] = now + duration[index]
        held[rank] += change[index]
        left[rank].remove(index)
        done[rank].append(index)
        heapq.heappush(events, (end, rank))
        for follower, hop in tasks.after[index]:
            missing[follower] -= 1
            ready[follower] = max(ready[follower], end + hop)
            other = tasks.rank[follower]
            if not missing[follower] and other != rank:
                heapq.heappush(events, (max(ready[follower], free_at[other]), other))
    assert all(remaining.empty for remaining in left), "the base order cannot finish"
    return tuple(map(tuple, done))


class _Remaining:
    """A rank's remaining tasks in base order, as a linked list: removing one anywhere takes constant time."""

    def __init__(self, row: Sequence[int]) -> None:
        self.row = row
        self.place = {task: index for index, task in enumerate(row)}
        self.after = list(range(1, len(row) + 2))  # the index past the end stands for the end
        self.before = list(range(-1, len(row)))
        self.head = 0

    @property
    def empty(self) -> bool:
        return self.head >= len(self.row)

    def window(self, size: int) -> list[int]:
        found: list[int] = []
        index = self.head
        while index < len(self.row) and len(found) < size:
            found.append(self.row[index])
            index = self.after[index]
        return found

    def remove(self, task: int) -> None:
        index = self.place[task]
        left, right = self.before[index], self.after[index]
        if left < 0:
            self.head = right
        else:
            self.after[left] = right
        if right < len(self.row):
            self.before[right] = left
