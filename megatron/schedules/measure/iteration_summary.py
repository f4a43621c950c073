"""Summary of one iteration, planned or measured, in a few numbers for logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from megatron.schedules.schedule.kinds import COMPUTING, OF_RANKS, Pass
from megatron.schedules.schedule.simulator import Timeline


class Slowest(NamedTuple):
    """The stage with the longest time, and its time over the mean of all stages, less one."""

    stage: int
    beyond_mean: float


@dataclass(frozen=True)
class Iteration:
    """An iteration of the whole job.

    Args:
        bubble: share of the ranks' time that is idle.
        stages: time of each stage's passes, without S, T and copies.
    """

    bubble: float
    stages: tuple[float, ...]

    @property
    def slowest(self) -> Slowest:
        """The stage with the longest time."""
        most, mean = max(self.stages), sum(self.stages) / len(self.stages)
        return Slowest(self.stages.index(most), most / mean - 1 if mean else 0.0)


def iteration_of(timeline: Timeline) -> Iteration:
    """Sums up ``timeline``, planned or measured, in the unit of its costs."""
    schedule = timeline.schedule
    stages = [0.0] * schedule.placement.stages
    for row, start, end in zip(schedule.order, timeline.start, timeline.end, strict=True):
        _add_up(stages, row, map(sub, end, start))
    return Iteration(timeline.bubble, tuple(stages))


@dataclass(frozen=True)
class RankTimes:
    """One rank's part in an iteration, in milliseconds.

    Args:
        busy: its computing time.
        until_last: time from the start of its program to the end of its last pass.
        stages: time of each stage's passes; 0 for stages of other ranks.
    """

    busy: float
    until_last: float
    stages: tuple[float, ...]


def rank_times(spans: Sequence[tuple[Pass, float, float]], stages: int) -> RankTimes:
    """Sums up one rank's passes, each with its start and end since the program began."""
    own = [0.0] * stages
    _add_up(own, (work for work, _, _ in spans), (end - start for _, start, end in spans))
    busy = sum(end - start for work, start, end in spans if work.kind in COMPUTING)
    return RankTimes(busy, max((end for _, _, end in spans), default=0.0), tuple(own))


def measured_iteration(busy: float, ranks: int, until_last: float, stages: Sequence[float]) -> Iteration:
    """Sums up all ranks' :class:`RankTimes`.

    Ranks have no common clock, but their programs begin at nearly the same time. So the time of the longest rank is
    used as the iteration time.

    Args:
        busy: sum over all ranks of all replicas, milliseconds.
        ranks: number of those ranks.
        until_last: the longest of them, milliseconds.
        stages: the longest replica of each stage, milliseconds.
    """
    return Iteration(1 - busy / (ranks * until_last) if until_last else 0.0, tuple(stages))


def _add_up(stages: list[float], works: Iterable[Pass], times: Iterable[float]) -> None:
    """Adds the times of passes to those of their stages."""
    for work, time in zip(works, times, strict=True):
        if work.kind in COMPUTING and work.kind not in OF_RANKS:
            stages[work.stage] += time
