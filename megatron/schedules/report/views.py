"""Views to draw: timelines on one time axis with labels and memory, each rank's time as lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron.schedules.measure.recorded_run import Recorded, Steps
from megatron.schedules.report.figures import number
from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, Resource
from megatron.schedules.schedule.simulator import Copy, Timeline

PLANNED, MEASURED = "planned", "measured"
_COPYING = (Resource.TO_HOST, Resource.FROM_HOST)
_KINDS = {channel: [kind for kind, row in KINDS.items() if row.resource is channel] for channel in _COPYING}
Lane = Sequence[tuple[Pass, float, float]]
"""Passes with start and end, ascending, without those of no duration."""


@dataclass(frozen=True)
class View:
    """One timeline to draw.

    Args:
        label: a word.
        timeline: in the unit of the axis.
        held: bytes of activations of each rank over time, if counted.
        microbatch_bytes: bytes of a microbatch's activations on an average rank; 0 if unknown.
    """

    label: str
    timeline: Timeline
    held: tuple[Steps, ...] = ()
    microbatch_bytes: float = 0.0

    @property
    def unit(self) -> str:
        """Unit of :meth:`memory`."""
        return "bytes" if self.held else "microbatches"

    def memory(self, rank: int) -> Steps:
        """Returns the activation memory of ``rank`` over time: bytes if counted, else planned microbatches."""
        return self.held[rank] if self.held else self.timeline.memory(rank)


def views(recorded: Recorded) -> tuple[View, View]:
    """Returns views of a recorded run's plan and of the run, both in milliseconds.

    The plan is scaled by :func:`scale`, so that the average computing time of a rank is the same in both.
    """
    return (
        View(PLANNED, scaled(recorded.planned, scale(recorded))),
        View(MEASURED, recorded.timeline, recorded.held),
    )


def scale(recorded: Recorded) -> float:
    """Returns the milliseconds in a unit of the plan, so that an average rank computes as long in it as in the run."""
    return recorded.timeline.ideal / recorded.planned.ideal


def explained(recorded: Recorded) -> str:
    """Says how the plan is scaled."""
    return (
        f"The plan is scaled so that an average rank computes as long in it as in the run: its unit is "
        f"{number(scale(recorded))} ms."
    )


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """Returns ``timeline`` with all times multiplied by ``factor``, including those of its costs."""
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


def extent(shown: Sequence[View]) -> float:
    """End of everything drawn."""
    ends = [max((end for row in view.timeline.copies for *_, end in row), default=0.0) for view in shown]
    return max(*ends, *(view.timeline.makespan for view in shown))


def running(counts: Sequence[int]) -> list[int]:
    """Returns the offsets of concatenated lists, and their total length."""
    return [0, *accumulate(counts)]


def lanes(timeline: Timeline, rank: int) -> list[Lane]:
    """Returns the lanes of ``rank``, the computing lane first. All ranks have the same number."""
    order, copies = timeline.schedule.order[rank], timeline.copies[rank] if timeline.copies else ()
    computing = zip(order, timeline.start[rank], timeline.end[rank], strict=True)
    channels = [[copy for copy in copies if copy.work.kind in kinds] for kinds in copied(timeline)]
    return [[span for span in lane if span[2] > span[1]] for lane in (computing, *channels)]


def copied(timeline: Timeline) -> list[list[Kind]]:
    """Returns the kinds of each copy lane of a rank: one lane for each direction if both can run at once."""
    if not any(timeline.copies):
        return []
    return [[kind for kinds in _KINDS.values() for kind in kinds]] if timeline.costs.one_way else list(_KINDS.values())
