"""The event simulator: when each pass of a schedule runs under given costs, what idles, what is held.

Every rank does its passes in order, each as soon as what it needs has ended (and, from another rank, has arrived one
P2P latency later). That is all there is to it, so one sweep over the passes is enough.

A rank has a clock for computing and one for each copy channel. A copy to the host begins once the forward before it
has ended and the channel is free, and at its place in the order computing waits for its end; a copy back begins at its
place, and the pass that needs it waits. So what is held follows from the order alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from megatron.schedules.schedule.kinds import KINDS, Resource
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Rows, Schedule, awaited, gradients_complete, slots
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError

Times = tuple[tuple[float, ...], ...]


class Copy(NamedTuple):
    """A pass that copies, and from when until when it does."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with the times of its passes.

    Args:
        schedule: what was timed.
        costs: what it was timed under.
        start, end: for each rank, the times of its passes in the schedule's order (the unit of the costs); of a copy
            both are the time of its place, when computing goes on.
        copies: for each rank the copies, in the order in which they begin.
    """

    schedule: Schedule
    costs: StageCosts
    start: Times
    end: Times
    copies: tuple[tuple[Copy, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end on any rank."""
        return max((row[-1] for row in self.end if row), default=0.0)

    @cached_property
    def ideal(self) -> float:
        """Time an average rank computes: n * 2 * (F + I + W) where stages are even, and R passes."""
        return sum(self._busy) / self.schedule.ranks

    @cached_property
    def _busy(self) -> list[float]:
        """How long each rank computes; its copies take none of this time."""
        return [sum(map(sub, ends, starts)) for starts, ends in zip(self.start, self.end, strict=True)]

    @property
    def bubble(self) -> float:
        """1 - ideal / makespan: the share of the ranks' time that is idle, whatever is copied meanwhile."""
        return max(0.0, 1 - self.ideal / self.makespan)  # no rounding below none

    @cached_property
    def span_bubble(self) -> float:
        """The papers' form: 1 - work / span on the worst rank, its span being from first start to last end."""
        rows = zip(self._busy, self.start, self.end, strict=True)
        return max(0.0, *(1 - busy / (ends[-1] - starts[0]) for busy, starts, ends in rows))

    @cached_property
    def recomputed(self) -> float:
        """The share of computing that R passes take; the papers count the rest."""
        recomputed = [work for _, work in self.schedule.passes() if KINDS[work.kind].spares]
        return sum(self.costs.durations_of(recomputed)) / (self.ideal * self.schedule.ranks)

    @property
    def useful(self) -> float:
        """The share of the ranks' time in which they compute what they had not computed before."""
        return (1 - self.bubble) * (1 - self.recomputed)

    @cached_property
    def copying(self) -> float:
        """The share of the makespan for which the busiest copy channel of any rank copies; 0 without copies."""
        busy: dict[tuple[int, Resource | None], float] = defaultdict(float)
        for rank, copies in enumerate(self.copies):
            for work, start, end in copies:
                busy[rank, None if self.costs.one_way else KINDS[work.kind].resource] += end - start
        return max(busy.values(), default=0.0) / self.makespan

    def memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Activation memory of ``rank`` over time, as steps (time, microbatches held from then on).

        An activation is held from the start of its F to the end of its W (or B), less what its I gives back.
        """
        return held_over_time(self.costs.changes_of(self.schedule.order[rank]), self.start[rank], self.end[rank])

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Each rank's peak activation memory, in microbatches' worth of one rank's activations."""
        return peaks(self.schedule, self.costs)

    def gradients_complete(self, rank: int) -> tuple[float, ...]:
        """For each chunk of ``rank``, the end of its last W (or B): from then its gradients can be reduced."""
        complete = gradients_complete(self.schedule.order[rank])
        return tuple(
            self.end[rank][complete[stage]] if stage in complete else 0.0
            for stage in self.schedule.placement.stages_of(rank)
        )

    @cached_property
    def limit(self) -> float:
        """The least memory limit that it keeps within: more than its peak where many parameters are on that rank."""
        return self.costs.within(self.schedule.placement, self.peaks)

    @property
    def peak(self) -> float:
        """Peak activation memory of the worst rank; 1F1B's is d, where there are so many microbatches."""
        return max(self.peaks)


def held_over_time(
    changes: Iterable[float], start: Iterable[float], end: Iterable[float]
) -> tuple[tuple[float, float], ...]:
    """What a rank holds, as steps (time, held from then on): a pass takes at its start, and gives back at its end.

    Args:
        changes: of each of its passes, in order, by how much more is held after it.
        start, end: of the same passes.
    """
    held, steps = 0.0, [(0.0, 0.0)]
    for change, begun, over in zip(changes, start, end, strict=True):
        held += change
        if change:
            steps.append((begun if change > 0 else over, held))
    return tuple(steps)


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Each rank's peak activation memory in microbatches. It follows from the order alone; no times are needed."""
    return tuple(round(max(accumulate(costs.changes_of(row)), default=0.0), 9) for row in schedule.order)


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Time ``schedule`` under ``costs``. Time and memory are linear in the passes.

    Raises:
        PlanError: where the order cannot finish; it names the pass each blocked rank waits at.
    """
    swept = sweep(schedule, costs)
    return Timeline(schedule, costs, swept.start, swept.end, swept.copies)


def _at_once(source: int, to: int) -> float:
    """The latency where there are no times."""
    return 0.0


class Sweep(NamedTuple):
    """What :func:`sweep` finds, by rank: start and end of each pass, its turn, and the copies.

    Turns tell where each stands where all are done one at a time, each after all that it waits for.
    """

    start: Times
    end: Times
    turns: Sequence[Sequence[int]]
    copies: tuple[tuple[Copy, ...], ...]


def sweep(schedule: Schedule, costs: StageCosts | None = None) -> Sweep:
    """Start and end of every pass, by rank; without ``costs`` every time is zero and only the order is proved."""
    lengths = [costs.durations_of(row) if costs else [0.0] * len(row) for row in schedule.order]
    places = slots(schedule.placement, schedule.microbatches)
    works = {
        kind: list(zip(needs, places[kind], strict=True))
        for kind, needs in awaited(schedule, costs.latency if costs else _at_once, own=False).items()
    }
    copied = zip(_with_copies(schedule), lengths, strict=False)
    channels = [_Channels(row, times, bool(costs and costs.one_way)) for row, times in copied]
    ended: list[float | None] = [None] * (len(KINDS) * schedule.placement.stages * schedule.microbatches)
    starts: list[list[float]] = [[] for _ in schedule.order]
    ends: list[list[float]] = [[] for _ in schedule.order]
    clock = [0.0] * schedule.ranks
    waiting: dict[int, list[int]] = {}
    turns: list[list[int]] = [[] for _ in schedule.order]
    done = 0
    ready = deque(range(schedule.ranks))

    while ready:
        rank = ready.popleft()
        row, now, copying = schedule.order[rank], clock[rank], channels[rank] if channels else None
        begun, over, turn, times = starts[rank], ends[rank], turns[rank], lengths[rank]
        for index in range(len(over), len(row)):
            stage, kind, m = row[index]
            needs, slot = works[kind][stage]
            begin = now
            for base, latency in needs:
                arrived = ended[base + m]
                if arrived is None:
                    waiting.setdefault(base + m, []).append(rank)
                    break
                if arrived + latency > begin:
                    begin = arrived + latency
            else:
                if copying is None:
                    now = begin + times[index]
                else:
                    begin, now = copying.took(row[index], begin)
                begun.append(begin)
                over.append(now)
                slot += m
                ended[slot] = now
                if slot in waiting:
                    ready.extend(waiting.pop(slot))
                continue
            break
        clock[rank] = now
        fresh = len(over) - len(turn)
        turn.extend(range(done, done + fresh))
        done += fresh

    stuck = [f"rank {r} at {row[len(ends[r])]}" for r, row in enumerate(schedule.order) if len(ends[r]) < len(row)]
    if stuck:
        raise PlanError(f"{schedule.name}: the order cannot finish: {', '.join(stuck[:4])} wait for each other")
    copies = tuple(tuple(each.copies) for each in channels)
    return Sweep(tuple(map(tuple, starts)), tuple(map(tuple, ends)), turns, copies)


def _with_copies(schedule: Schedule) -> Rows:
    """The rows of ``schedule`` where it has copies; none where computing is all there is."""
    return schedule.order if any(KINDS[kind].resource is not Resource.COMPUTE for kind in schedule.kinds) else ()


class _Channels:
    """The copy channels of one rank, while its passes are done in turn.

    Args:
        row: all of them.
        lengths: how long each of them takes.
        one_way: whether there is one channel for both directions.
    """

    def __init__(self, row: Sequence[Pass], lengths: Sequence[float], one_way: bool) -> None:
        self.copies: list[Copy] = []
        self._lengths = dict(zip(row, lengths, strict=True))
        self._channel = dict.fromkeys(Resource, Resource.TO_HOST) if one_way else {each: each for each in Resource}
        self._free = dict.fromkeys(Resource, 0.0)
        # By the pass that it waits for, each copy that begins as soon as it can.
        self._at_once = {
            Pass(stage, needed, m): Pass(stage, kind, m)
            for stage, kind, m in row
            if KINDS[kind].resource is Resource.TO_HOST
            for need in KINDS[kind].needs
            for needed in need.kinds
        }
        self._ends: dict[Pass, float] = {}

    def took(self, work: Pass, begin: float) -> tuple[float, float]:
        """From when until when computing was at ``work``, which it may have reached at ``begin``."""
        stage, kind, m = work
        resource = KINDS[kind].resource
        if resource is Resource.TO_HOST:
            end = begin = max(begin, self._ends.pop(work))
        elif resource is Resource.FROM_HOST:
            end = begin
            self._copy(work, begin)
        else:
            for loaded in _LOADED_FOR.get(kind, ()):
                begin = max(begin, self._ends.pop(Pass(stage, loaded, m), 0.0))
            end = begin + self._lengths[work]
        following = self._at_once.get(work)
        if following is not None:
            self._copy(following, end)
        return begin, end

    def _copy(self, work: Pass, earliest: float) -> None:
        channel = self._channel[KINDS[work.kind].resource]
        start = max(earliest, self._free[channel])
        self._ends[work] = self._free[channel] = start + self._lengths[work]
        self.copies.append(Copy(work, start, self._free[channel]))


# What is copied back for passes of each kind.
_LOADED_FOR = {
    kind: [each for need in row.needs for each in need.kinds if KINDS[each].resource is Resource.FROM_HOST]
    for kind, row in KINDS.items()
}
