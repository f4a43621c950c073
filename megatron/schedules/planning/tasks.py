"""A schedule as numbered tasks in flat lists: the plain form in which orders are timed and improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.kinds import KINDS, Kind, Resource, sources
from megatron.schedules.planning.list_scheduling import Instance
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.schedule import Rows, Schedule


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
        filler: whether nothing waits for the task, as for a W.
        steady: whether the task stands before its rank's last forward.
        channel: the copy channel that the task keeps busy, numbered over all ranks; -1 for one that computes.
        copying: how long, where it copies; its duration, the time it computes, is then 0.
        opens: whether the copy begins at the task's place, rather than as soon as it can and ends there at the latest.
        before, after: what each task waits for, and what waits for it.
    """

    first: list[int]
    rank: list[int]
    duration: list[float]
    change: list[float]
    filler: list[bool]
    steady: list[bool]
    channel: list[int]
    copying: list[float]
    opens: list[bool]
    before: Links
    after: Links

    def reversed(self) -> Tasks:
        """The same tasks with time running backwards."""
        change, opens = (
            [-c for c in self.change],
            [c >= 0 and not o for c, o in zip(self.channel, self.opens, strict=True)],
        )
        return replace(self, change=change, opens=opens, before=self.after, after=self.before)

    def reversed_order(self, order: Sequence[int]) -> list[int]:
        """``order`` with each rank's part the other way round."""
        found: list[int] = []
        for start, end in pairwise(self.first):
            found += order[start:end][::-1]
        return found

    @property
    def instance(self) -> Instance:
        """What list scheduling is given."""
        links = self.after
        of_tasks = (self.first, self.rank, self.duration, self.change, self.filler, self.steady)
        copies = (self.channel, self.copying, self.opens)
        return Instance(*of_tasks, *copies, self.before.counts(), links.start, links.task, links.delay)

    def rows(self, order: Sequence[int], passes: Sequence[Pass]) -> Rows:
        """``order`` as a schedule's rows, given the pass of each task."""
        return tuple(tuple(passes[task] for task in order[start:end]) for start, end in pairwise(self.first))


def tasks_of(schedule: Schedule, costs: StageCosts) -> tuple[Tasks, list[Pass]]:
    """Number the passes of ``schedule`` rank by rank in its order; also the pass of each number."""
    passes = [work for _, work in schedule.passes()]
    number = {work: index for index, work in enumerate(passes)}
    placement = schedule.placement
    rank_of, durations = placement.rank_of, costs.durations
    needed = {
        (stage, kind): [
            (source, kinds, 0.0 if rank_of[source] == rank_of[stage] else costs.comm)
            for source, kinds in sources(kind, stage, placement)
        ]
        for stage in range(placement.stages)
        for kind in KINDS
    }
    before: list[list[tuple[int, float]]] = [[] for _ in passes]
    after: list[list[tuple[int, float]]] = [[] for _ in passes]
    for index, (stage, kind, m) in enumerate(passes):
        for source, kinds, delay in needed[stage, kind]:
            for each in kinds:
                found = number.get(Pass(source, each, m))
                if found is not None:
                    before[index].append((found, delay))
                    after[found].append((index, delay))
                    break
    steady: list[bool] = []
    for row in schedule.order:
        last_forward = max((place for place, work in enumerate(row) if work.kind is Kind.F), default=0)
        steady += [place < last_forward for place in range(len(row))]
    copies = [KINDS[work.kind].resource is not Resource.COMPUTE for work in passes]
    lengths = [durations[work.kind][work.stage] for work in passes]
    tasks = Tasks(
        first=[0, *accumulate(map(len, schedule.order))],
        rank=[rank_of[work.stage] for work in passes],
        duration=[0.0 if copy else length for copy, length in zip(copies, lengths, strict=True)],
        change=[change for row in schedule.order for change in costs.changes_of(row)],
        filler=[KINDS[work.kind].filler for work in passes],
        steady=steady,
        channel=[
            2 * rank_of[work.stage] + (KINDS[work.kind].resource is Resource.TO_HOST and not costs.one_way)
            if copy
            else -1
            for copy, work in zip(copies, passes, strict=True)
        ],
        copying=[length if copy else 0.0 for copy, length in zip(copies, lengths, strict=True)],
        opens=[KINDS[work.kind].resource is Resource.FROM_HOST for work in passes],
        before=Links.of(before),
        after=Links.of(after),
    )
    return tasks, passes
