"""A timeline as a few compressed arrays and a small table of contents, which the page unpacks."""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import sub
from typing import Any

from megatron.schedules.report.idle import Gap, phases
from megatron.schedules.report.views import Lane, View, lanes, running
from megatron.schedules.schedule.kinds import KINDS, Pass

# Times are integers in ticks; this is the length of the axis in ticks.
TICKS = 1 << 30
_KINDS = {kind: index for index, kind in enumerate(KINDS)}


class Packer:
    """Collects arrays of numbers, little-endian, each at a multiple of four bytes.

    Ascending times are stored as differences, which compress well.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, code: str, values: Iterable[float]) -> list[Any]:
        """Appends ``values``. Returns their type, offset and count.

        Args:
            code: ``B`` (one byte), ``I`` (four bytes, unsigned), ``i`` (signed) or ``f``, as in :mod:`array`.
            values: numbers that fit.
        """
        self._bytes += bytes(-len(self._bytes) % 4)
        packed = array(code, values)
        if sys.byteorder == "big":
            packed.byteswap()
        place = [code, len(self._bytes), len(packed)]
        self._bytes += packed.tobytes()
        return place

    def text(self) -> str:
        """All arrays as a zlib stream in base64."""
        return base64.b64encode(zlib.compress(bytes(self._bytes), 6)).decode()


def packed(view: View, until: float, gaps: Sequence[Sequence[Gap]], into: Packer) -> dict[str, Any]:
    """Packs one view. Returns its table of contents:

    - ``rows``: index of the first pass of each lane, those of rank 0 first.
    - ``kind``, ``stage``, ``microbatch``: of each pass.
    - ``gap``: ticks from the end of the previous pass (or 0) to the start of each pass.
    - ``length``: its duration in ticks.
    - ``awaited``: the pass that its rank waited for before it; -1 for none.
    - ``levels``: steps of memory, ``since`` ticks after the previous step, and ``held`` from then on.
    - ``turns``: end of warm-up and start of cool-down.
    """
    timeline = view.timeline
    by_rank = [lanes(timeline, rank) for rank in range(timeline.schedule.ranks)]
    items = [lane for rank in by_rank for lane in rank]
    rows = running([len(lane) for lane in items])
    times = [_ticks(lane, until) for lane in items]
    works = [work for lane in items for work, *_ in lane]
    memory = [_stepped(view.memory(rank), until) for rank in range(timeline.schedule.ranks)]
    return {
        "label": view.label,
        "ranks": timeline.schedule.ranks,
        "lanes": len(by_rank[0]),
        "chunks": timeline.schedule.placement.chunks,
        "rankOf": list(timeline.schedule.placement.rank_of),
        "chunkOf": [timeline.schedule.placement.chunk_of(s) for s in range(timeline.schedule.placement.stages)],
        "makespan": timeline.makespan,
        "unit": view.unit,
        "one": view.microbatch_bytes,
        "turns": [_turns(view, rank) for rank in range(timeline.schedule.ranks)],
        "rows": into.add("I", rows),
        "kind": into.add("B", (_KINDS[work.kind] for work in works)),
        "stage": into.add("I", (work.stage for work in works)),
        "microbatch": into.add("I", (work.microbatch for work in works)),
        "gap": into.add("I", (gap for lane in times for gap, _ in lane)),
        "length": into.add("I", (length for lane in times for _, length in lane)),
        "awaited": into.add("i", _awaited(view, gaps, works)),
        "levels": into.add("I", running([len(steps) for steps in memory])),
        "since": into.add("I", (since for steps in memory for since, _ in steps)),
        "held": into.add("f", (held for steps in memory for _, held in steps)),
    }


def _ticks(lane: Lane, until: float) -> list[tuple[int, int]]:
    """Returns each pass's distance from the previous one, and its length; small overlaps are removed."""
    ticks, free = [], 0
    for _, start, end in lane:
        begun = max(free, round(start / until * TICKS))
        over = max(begun, round(end / until * TICKS))
        ticks.append((begun - free, over - begun))
        free = over
    return ticks


def _stepped(steps: Sequence[tuple[float, float]], until: float) -> list[tuple[int, float]]:
    """Returns steps by distance from the previous one; changes at the same time are summed."""
    at: dict[int, float] = {}
    now = 0
    for time, held in steps:
        now = max(now, min(TICKS, round(time / until * TICKS)))
        at[now] = held
    return [(later - earlier, at[later]) for earlier, later in pairwise([0, *at])]


def _turns(view: View, rank: int) -> list[float]:
    """Returns the end of the rank's warm-up and the start of its cool-down."""
    first, last = phases(view.timeline.schedule.order[rank])
    start, end = view.timeline.start[rank], view.timeline.end[rank]
    return [start[first], max(start[first], end[last] if last >= 0 else 0.0)] if start else [0.0, 0.0]


def _awaited(view: View, gaps: Sequence[Sequence[Gap]], works: Sequence[Pass]) -> list[int]:
    """Returns the index of the pass that the rank of each pass waited for. Passes without duration are not drawn."""
    timeline, waits = view.timeline, dict[Pass, Pass]()
    for rank, row in enumerate(gaps):
        order, lengths = timeline.schedule.order, list(map(sub, timeline.end[rank], timeline.start[rank]))
        for gap in row:
            drawn = next((at for at in range(gap.at, len(lengths)) if lengths[at] > 0), None)
            if gap.needed and drawn is not None:
                waits[order[rank][drawn]] = order[gap.needed[0]][gap.needed[1]]
    place = {work: index for index, work in enumerate(works)}
    return [place.get(waits[work], -1) if work in waits else -1 for work in works]
