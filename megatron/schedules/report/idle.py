"""Idle time of a timeline, planned or measured: in which phase, and waiting for which rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron.schedules.schedule.kinds import KINDS, Pass, Resource, Result
from megatron.schedules.schedule.schedule import awaited_elsewhere, slots
from megatron.schedules.schedule.simulator import Timeline


class Phase(StrEnum):
    """A part of a rank's iteration."""

    WARM_UP = "warm-up"
    STEADY = "steady state"
    COOL_DOWN = "cool-down"


class Cause(StrEnum):
    """Cause of a wait."""

    PASS = "passes of other ranks"
    MESSAGE = "messages on their way"
    COPY = "its own copies"
    HOST = "its host, or a late message"
    DONE = "nothing left to do"


class Wait(NamedTuple):
    """Part of a gap: its cause, the rank that causes it (the rank itself if no other does), and its time."""

    cause: Cause
    rank: int
    time: float


class Gap(NamedTuple):
    """Time in which a rank does not compute.

    Args:
        at: index in the rank's row of the pass after it; the row's length at the end.
        start, end: times.
        phase: phase of the rank.
        waits: parts, whose times add up to the gap.
        needed: rank, and index in its row, of the pass that ends last among those that the next pass needs.
    """

    at: int
    start: float
    end: float
    phase: Phase
    waits: tuple[Wait, ...]
    needed: tuple[int, int] | None


@dataclass(frozen=True)
class Idle:
    """Idle time of one rank, in the unit of its timeline.

    Args:
        rank: number.
        total: iteration time less the rank's computing time.
        phases: idle time in each phase.
        causes: idle time by cause and by the rank that causes it.
    """

    rank: int
    total: float
    phases: Mapping[Phase, float]
    causes: Mapping[tuple[Cause, int], float]

    def of(self, *causes: Cause) -> float:
        """Idle time due to ``causes``, of any rank."""
        return sum(time for (cause, _), time in self.causes.items() if cause in causes)

    @property
    def for_ranks(self) -> list[tuple[int, float]]:
        """Ranks for whose passes and messages this rank waited, with the times; the longest first."""
        times: dict[int, float] = {}
        for (cause, rank), time in self.causes.items():
            if cause in (Cause.PASS, Cause.MESSAGE) and time > 0:
                times[rank] = times.get(rank, 0.0) + time
        return sorted(times.items(), key=lambda pair: (-pair[1], pair[0]))


def gaps(timeline: Timeline) -> tuple[tuple[Gap, ...], ...]:
    """Finds each rank's gaps, in order.

    Warm-up lasts until the rank's first backward starts. Cool-down starts when its last forward and its warm-up are
    over. Without backwards, warm-up ends when the first pass starts.

    A rank waits for the last pass to end of those that its next pass needs, then for its message. If that pass had
    ended before the rank was free, waiting for the message counts until one P2P latency after its end. The rest is due
    to the host or a late message.
    """
    ended = _Ended(timeline)
    return tuple(tuple(_gaps_of(timeline, rank, ended)) for rank in range(timeline.schedule.ranks))


def idle(timeline: Timeline, known: Sequence[Sequence[Gap]] | None = None) -> tuple[Idle, ...]:
    """Sums up the idle time of every rank. Its mean is the bubble ratio times the iteration time.

    Args:
        timeline: planned or measured.
        known: its :func:`gaps`, if already computed.
    """
    return tuple(_idle_of(rank, row) for rank, row in enumerate(gaps(timeline) if known is None else known))


def phases(row: Sequence[Pass]) -> tuple[int, int]:
    """Returns the index of a rank's first backward, and of its last forward."""
    first = next((i for i, work in enumerate(row) if KINDS[work.kind].makes is Result.GRADIENT), 0)
    last = max((i for i, work in enumerate(row) if KINDS[work.kind].makes is Result.ACTIVATION), default=-1)
    return first, last


def _idle_of(rank: int, row: Sequence[Gap]) -> Idle:
    by_phase = dict.fromkeys(Phase, 0.0)
    by_cause: dict[tuple[Cause, int], float] = {}
    for gap in row:
        by_phase[gap.phase] += gap.end - gap.start
        for cause, whose, time in gap.waits:
            by_cause[cause, whose] = by_cause.get((cause, whose), 0.0) + time
    return Idle(rank, sum(by_phase.values()), by_phase, by_cause)


class _Ended:
    """End times of the passes that a pass needs."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self._rank_of, self._latency = schedule.placement.rank_of, timeline.costs.latency
        self._places = slots(schedule.placement, schedule.microbatches)
        self.where: dict[int, tuple[int, int]] = {
            self._places[kind][stage] + m: (rank, index)
            for rank, row in enumerate(schedule.order)
            for index, (stage, kind, m) in enumerate(row)
        }
        self._end = timeline.end
        self._needs = awaited_elsewhere(schedule)
        self._copied = [{work: end for work, _, end in copies} for copies in timeline.copies]

    def last(self, work: Pass) -> tuple[float, float, tuple[int, int]] | None:
        """Returns end, latency and position of the pass on another rank that ``work`` needs and that arrives last."""
        stage, kind, m = work
        latest: tuple[float, float, tuple[int, int]] | None = None
        for source, base in self._needs[stage, kind]:
            at = self.where.get(base + m)
            if at is not None:
                end, latency = self._end[at[0]][at[1]], self._latency(source, self._rank_of[stage])
                if latest is None or end + latency > latest[0] + latest[1]:
                    latest = end, latency, at
        return latest

    def copied(self, rank: int, work: Pass) -> tuple[float, tuple[int, int]] | None:
        """Returns the end of the copy that ``work`` waits for, and the position of its pass."""
        if not self._copied:
            return None
        copies, (stage, kind, m) = self._copied[rank], work
        if KINDS[kind].resource is Resource.TO_HOST:
            waited = [work]
        else:
            needed = [other for need in KINDS[kind].needs for other in need.kinds]
            waited = [Pass(stage, other, m) for other in needed if KINDS[other].resource is Resource.FROM_HOST]
        ends = [(copies[other], self.where[self._places[other.kind][stage] + m]) for other in waited if other in copies]
        return max(ends, default=None)


def _gaps_of(timeline: Timeline, rank: int, ended: _Ended) -> Iterator[Gap]:
    row, free = timeline.schedule.order[rank], 0.0
    first, last = phases(row)
    for index, (work, start, end) in enumerate(zip(row, timeline.start[rank], timeline.end[rank], strict=True)):
        if start != free:
            phase = Phase.WARM_UP if index <= first else Phase.STEADY if index <= last else Phase.COOL_DOWN
            waits, needed = _waits(rank, work, free, start, ended)
            yield Gap(index, free, start, phase, waits, needed)
        free = end
    if timeline.makespan != free:
        done = Wait(Cause.DONE, rank, timeline.makespan - free)
        yield Gap(len(row), free, timeline.makespan, Phase.COOL_DOWN, (done,), None)


def _waits(
    rank: int, work: Pass, free: float, start: float, ended: _Ended
) -> tuple[tuple[Wait, ...], tuple[int, int] | None]:
    """Waits of ``rank`` from ``free`` to the ``start`` of ``work``."""
    passed, copied = ended.last(work), ended.copied(rank, work)
    if copied is not None and (passed is None or copied[0] > passed[0] + passed[1]):
        until = min(max(copied[0], free), start)
        parts = [Wait(Cause.COPY, rank, until - free), Wait(Cause.HOST, rank, start - until)]
        needed = copied[1]
    elif passed is not None:
        end, latency, needed = passed
        over = min(max(end, free), start)
        there = start if end > free else min(max(end + latency, free), start)
        parts = [
            Wait(Cause.PASS, needed[0], over - free),
            Wait(Cause.MESSAGE, needed[0], there - over),
            Wait(Cause.HOST, rank, start - there),
        ]
    else:
        return (Wait(Cause.HOST, rank, start - free),), None
    kept = tuple(part for part in parts if part.time)
    return kept, needed if any(part.cause is not Cause.HOST for part in kept) else None
