"""Timelines as a trace in Chrome's JSON format, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron.schedules.report.idle import Gap, gaps
from megatron.schedules.report.views import View, copied, lanes, running
from megatron.schedules.schedule.kinds import KINDS
from megatron.schedules.schedule.simulator import Timeline

Event = dict[str, Any]

_IDLE = 99  # number of the thread of waits, below the others
_MICROSECONDS = 1000.0  # microseconds in a unit of time, which is a millisecond


def draw_trace(shown: Sequence[View]) -> str:
    """Writes a trace of ``shown``: a process for each rank of each view.

    A process has threads for computing, for each copy channel and for waits, and a counter for memory. Times are in
    milliseconds. One unit of a plan's time counts as one millisecond.
    """
    before = running([view.timeline.schedule.ranks for view in shown])
    events = [event for first, view in zip(before, shown, strict=False) for event in _events(first, view)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(first: int, view: View) -> Iterator[Event]:
    """Yields the events of a view; its first process has number ``first``."""
    timeline = view.timeline
    by_rank = gaps(timeline)
    threads = ["computing", *(" and ".join(KINDS[kind].meaning for kind in kinds) for kinds in copied(timeline))]
    for rank in range(timeline.schedule.ranks):
        process = {"pid": first + rank + 1}
        yield _named(process, "process_name", name=f"{view.label} rank {rank}")
        yield _named(process, "process_sort_index", sort_index=first + rank)
        for thread, (name, lane) in enumerate(zip(threads, lanes(timeline, rank), strict=True)):
            yield _named(process | {"tid": thread}, "thread_name", name=name)
            yield _named(process | {"tid": thread}, "thread_sort_index", sort_index=thread)
            for work, start, end in lane:
                row = {
                    "stage": work.stage,
                    "microbatch": work.microbatch,
                    "chunk": timeline.schedule.placement.chunk_of(work.stage),
                }
                yield _complete(process | {"tid": thread}, str(work), KINDS[work.kind].meaning, start, end, row)
        yield _named(process | {"tid": _IDLE}, "thread_name", name="idle")
        yield _named(process | {"tid": _IDLE}, "thread_sort_index", sort_index=_IDLE)
        for gap in by_rank[rank]:
            yield from _waits(process | {"tid": _IDLE}, timeline, rank, gap)
        yield from _counters(process, view, rank)


def _named(where: Event, what: str, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, **where, "args": arguments}


def _complete(where: Event, name: str, category: str, start: float, end: float, arguments: Event) -> Event:
    # Both ends are rounded, so that the next event begins where this one ends.
    times = {"ts": _at(start), "dur": round(_at(end) - _at(start), 3)}
    return {"ph": "X", "name": name, "cat": category, **where, **times, "args": arguments}


def _at(time: float) -> float:
    return round(time * _MICROSECONDS, 3)


def _waits(where: Event, timeline: Timeline, rank: int, gap: Gap) -> Iterator[Event]:
    """Yields the waits of a gap, one after another."""
    begun = gap.start
    waited = {} if gap.needed is None else {"for": str(timeline.schedule.order[gap.needed[0]][gap.needed[1]])}
    for cause, whose, time in gap.waits:
        name = f"{cause}" if whose == rank else f"waits for rank {whose}"
        yield _complete(where, name, "idle", begun, begun + time, {"phase": gap.phase, "cause": cause} | waited)
        begun += time


def _counters(process: Event, view: View, rank: int) -> Iterator[Event]:
    # Changes at the same time are summed.
    steps = [*dict(view.memory(rank)).items(), (view.timeline.makespan, 0.0)]
    for (time, held), (later, _) in pairwise(steps):
        if later > time or held == 0:
            yield {"ph": "C", "name": "activations", **process, "ts": _at(time), "args": {view.unit: round(held, 6)}}
