"""What is drawn: timelines on one time axis with labels and memory, each rank's time as lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.measure.recorded_run import Recorded, Steps
from megatron.schedules.report.figures import number
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.simulator import Copy, Timeline

PLANNED, MEASURED = "planned", "measured"
_COPYING = (Resource.TO_HOST, Resource.FROM_HOST)
_KINDS = {each: [kind for kind, row in KINDS.items() if row.resource is each] for each in _COPYING}
Lane = Sequence[tuple[Pass, float, float]]
"""What runs in it, from when until when, ascending; nothing that takes no time."""


@dataclass(frozen=True)
class View:
    """One timeline to draw.

    Args:
        label: what it is, in a word.
        timeline: its passes, in the unit of the axis.
        held: by rank, bytes of activations over time, where they were counted.
        microbatch_bytes: what one microbatch's worth of one rank's activations takes; 0 where no model says it.
    """

    label: str
    timeline: Timeline
    held: tuple[Steps, ...] = ()
    microbatch_bytes: float = 0.0

    @property
    def unit(self) -> str:
        """What :meth:`memory` is in."""
        return "bytes" if self.held else "microbatches"

    def memory(self, rank: int) -> Steps:
        """What ``rank`` holds over time: bytes where they were counted, else microbatches as planned."""
        return self.held[rank] if self.held else self.timeline.memory(rank)


def views(recorded: Recorded) -> tuple[View, View]:
    """The plan of a recorded run and the run itself, both in milliseconds.

    Plans are made in any unit, so the plan is scaled by :func:`scale`: an average rank then works as long in it as it
    did in the run, and what differs is where the work lies and how long ranks wait.
    """
    return (
        View(PLANNED, scaled(recorded.planned, scale(recorded))),
        View(MEASURED, recorded.timeline, recorded.held),
    )


def scale(recorded: Recorded) -> float:
    """How many milliseconds a unit of the plan is, where an average rank works as long in it as in the run."""
    return recorded.timeline.ideal / recorded.planned.ideal


def explained(recorded: Recorded) -> str:
    """That the plan is scaled, and how, in one sentence."""
    return (
        f"The plan is scaled so that an average rank computes as long in it as in the run: its unit is "
        f"{number(scale(recorded))} ms."
    )


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """``timeline`` with all its times, and those of its costs, times ``factor``."""
    costs = timeline.costs
    return Timeline(
        timeline.schedule,
        replace(
            costs,
            times={kind: tuple(factor * time for time in times) for kind, times in costs.times.items()},
            comm=factor * costs.comm,
            latencies={pair: factor * latency for pair, latency in costs.latencies.items()},
        ),
        tuple(tuple(factor * time for time in row) for row in timeline.start),
        tuple(tuple(factor * time for time in row) for row in timeline.end),
        tuple(tuple(Copy(work, factor * start, factor * end) for work, start, end in row) for row in timeline.copies),
    )


class SlowestStage(NamedTuple):
    """The stage that computes longest: its rank, how long a microbatch takes on it, and by what share that is more.

    Than on the mean of all stages, as logs have it (:mod:`megatron.schedules.measure.iteration_summary`).
    """

    stage: int
    rank: int
    time: float
    beyond_mean: float


def slowest_stage(timeline: Timeline) -> SlowestStage:
    """That of ``timeline``."""
    found = iteration_of(timeline)
    stage, beyond = found.slowest
    placement, n = timeline.schedule.placement, timeline.schedule.microbatches
    return SlowestStage(stage, placement.rank_of[stage], found.stages[stage] / n, beyond)


def extent(shown: Sequence[View]) -> float:
    """Until when there is something to draw."""
    ends = [max((end for row in view.timeline.copies for *_, end in row), default=0.0) for view in shown]
    return max(*ends, *(view.timeline.makespan for view in shown))


def running(counts: Sequence[int]) -> list[int]:
    """Where each of several lists begins where they stand one after another; at the end, how many there are in all."""
    return [0, *accumulate(counts)]


def lanes(timeline: Timeline, rank: int) -> list[Lane]:
    """The lanes of ``rank``, that of computing first; there are as many on every rank."""
    order, copies = timeline.schedule.order[rank], timeline.copies[rank] if timeline.copies else ()
    computing = zip(order, timeline.start[rank], timeline.end[rank], strict=True)
    channels = [[each for each in copies if each.work.kind in kinds] for kinds in copied(timeline)]
    return [[each for each in lane if each[2] > each[1]] for lane in (computing, *channels)]


def copied(timeline: Timeline) -> list[list[Kind]]:
    """What each of a rank's lanes of copies is for: one a direction where both may run at once."""
    if not any(timeline.copies):
        return []
    return [[kind for kinds in _KINDS.values() for kind in kinds]] if timeline.costs.one_way else list(_KINDS.values())
