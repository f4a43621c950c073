"""What one iteration came to, as planned and as measured: a few numbers that ranks can add up and a log can say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from megatron.schedules.schedule.kinds import KINDS, OF_RANKS, Resource
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.simulator import Timeline


class Slowest(NamedTuple):
    """The stage that takes longest, and by what share it takes longer than the mean of all."""

    stage: int
    beyond_mean: float


@dataclass(frozen=True)
class Iteration:
    """An iteration of the whole job.

    Args:
        bubble: the share of the ranks' time that is idle.
        stages: by stage, how long its passes take together; passes of every rank (S and T) and copies are left out.
    """

    bubble: float
    stages: tuple[float, ...]

    @property
    def slowest(self) -> Slowest:
        """The first of those that take longest."""
        most, mean = max(self.stages), sum(self.stages) / len(self.stages)
        return Slowest(self.stages.index(most), most / mean - 1 if mean else 0.0)


def iteration_of(timeline: Timeline) -> Iteration:
    """``timeline``, planned or measured, in these numbers, in the unit of its costs."""
    schedule = timeline.schedule
    stages = [0.0] * schedule.placement.stages
    for row, start, end in zip(schedule.order, timeline.start, timeline.end, strict=True):
        _add_up(stages, row, map(sub, end, start))
    return Iteration(timeline.bubble, tuple(stages))


@dataclass(frozen=True)
class RankTimes:
    """One rank's part in an iteration, in milliseconds.

    Args:
        busy: how long it computed.
        until_last: from when its program began until its last pass ended.
        stages: by stage of the whole model, how long the passes took; 0 for those of other ranks.
    """

    busy: float
    until_last: float
    stages: tuple[float, ...]


def rank_times(spans: Sequence[tuple[Pass, float, float]], stages: int) -> RankTimes:
    """One rank's record of a run: each pass and its start and end, since the program began."""
    own = [0.0] * stages
    _add_up(own, (work for work, _, _ in spans), (end - start for _, start, end in spans))
    busy = sum(end - start for work, start, end in spans if _computes(work))
    return RankTimes(busy, max((end for _, _, end in spans), default=0.0), tuple(own))


def measured_iteration(busy: float, ranks: int, until_last: float, stages: Sequence[float]) -> Iteration:
    """An iteration from what all ranks' :class:`RankTimes` come to.

    Ranks have no common clock. Their programs begin together, to within what the optimizer's step and the loading of
    data leave between them; so the iteration is taken to be as long as the longest rank's own time.

    Args:
        busy: the sum over all ranks, replicas too.
        ranks: how many those are.
        until_last: the longest of them.
        stages: by stage the longest of its replicas.
    """
    return Iteration(1 - busy / (ranks * until_last) if until_last else 0.0, tuple(stages))


def _add_up(stages: list[float], works: Iterable[Pass], times: Iterable[float]) -> None:
    """Add the times of passes to those of their stages."""
    for work, time in zip(works, times, strict=True):
        if work.kind not in OF_RANKS and _computes(work):
            stages[work.stage] += time


def _computes(work: Pass) -> bool:
    return KINDS[work.kind].resource is Resource.COMPUTE
