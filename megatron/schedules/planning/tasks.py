"""A schedule as numbered tasks in flat lists: the plain form in which orders are played through and improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.schedule import Order, Schedule


@dataclass(frozen=True)
class Links:
    """For each task the tasks at the other end of its precedences, and the delay between.

    Those of task t stand from ``start[t]`` up to ``start[t + 1]``.
    """

    start: list[int]
    task: list[int]
    delay: list[float]

    @staticmethod
    def of(pairs: Sequence[Sequence[tuple[int, float]]]) -> Links:
        """From a list of (task, delay) for each task."""
        start = [0, *accumulate(map(len, pairs))]
        return Links(start, [task for row in pairs for task, _ in row], [delay for row in pairs for _, delay in row])

    def counts(self) -> list[int]:
        """How many links each task has."""
        return [end - start for start, end in pairwise(self.start)]


@dataclass(frozen=True)
class Tasks:
    """The tasks of a schedule and what binds them, but not their order.

    Args:
        first: those of rank r are numbered from ``first[r]`` up to ``first[r + 1]``, in the schedule's order.
        rank, duration: of each task.
        change: of each task, the activation memory it takes (from its start) or, negative, gives back (at its end).
        weight: whether the task is a W.
        steady: whether the task stands before its rank's last forward.
        before, after: what each task waits for, and what waits for it.
    """

    first: list[int]
    rank: list[int]
    duration: list[float]
    change: list[float]
    weight: list[bool]
    steady: list[bool]
    before: Links
    after: Links

    def reversed(self) -> Tasks:
        """The same tasks with time running backwards."""
        return replace(self, change=[-c for c in self.change], before=self.after, after=self.before)

    def turned(self, order: Sequence[int]) -> list[int]:
        """``order`` with each rank's part the other way round."""
        turned: list[int] = []
        for start, end in pairwise(self.first):
            turned += order[start:end][::-1]
        return turned

    def rows(self, order: Sequence[int], passes: Sequence[Pass]) -> Order:
        """``order`` as a schedule's rows, given the pass of each task."""
        return tuple(tuple(passes[task] for task in order[start:end]) for start, end in pairwise(self.first))


def tasks_of(schedule: Schedule, costs: StageCosts) -> tuple[Tasks, list[Pass]]:
    """Number the passes of ``schedule`` rank by rank in its order; also the pass of each number."""
    passes = [work for _, work in schedule.passes()]
    number = {work: index for index, work in enumerate(passes)}
    rank_of, last = schedule.placement.rank_of, schedule.placement.last_stage
    durations, changes = costs.durations, costs.changes
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
    steady: list[bool] = []
    for row in schedule.order:
        last_forward = max((place for place, work in enumerate(row) if work.kind is Kind.F), default=0)
        steady += [place < last_forward for place in range(len(row))]
    tasks = Tasks(
        first=[0, *accumulate(map(len, schedule.order))],
        rank=[rank_of[work.stage] for work in passes],
        duration=[durations[work.kind][work.stage] for work in passes],
        change=[changes[work.kind][work.stage] for work in passes],
        weight=[work.kind is Kind.W for work in passes],
        steady=steady,
        before=Links.of(before),
        after=Links.of(after),
    )
    return tasks, passes
