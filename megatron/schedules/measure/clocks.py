"""Aligns the clocks of all ranks, from the times of passes that wait for one another.

Devices have no common clock. A pass starts at least one latency after the end of the pass on another rank that it waits
for. Between most pairs of ranks, some passes of an iteration wait for nothing else. So, as in time protocols, the least
time from an end on one rank to a start on the other is the latency plus the difference of their clocks. The least time
the other way is the latency minus that difference. Half the sum is the latency, half the difference is the offset of
one clock. This assumes that messages take equally long both ways.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.schedules.schedule.kinds import KINDS
from megatron.schedules.schedule.schedule import Schedule, awaited_elsewhere, slots
from megatron.schedules.schedule.simulator import Times

Gaps = Mapping[tuple[int, int], float]
"""By (from, to) rank, the least time from the end of a pass to the start of one that waits for it."""
Latencies = Mapping[tuple[int, int], float]
"""By (from, to) rank, the latency of a message."""


class Aligned(NamedTuple):
    """An iteration on one clock.

    Args:
        start, end: times of each rank's passes in the schedule's order; 0 is the first start on any rank.
        shifts: offsets added to each rank's times.
    """

    start: Times
    end: Times
    shifts: tuple[float, ...]


def aligned(schedule: Schedule, start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> Aligned:
    """Puts an iteration on one clock, so that no pass starts before the passes that it waits for have ended.

    Args:
        schedule: the schedule that ran.
        start, end: times of each rank's passes in the schedule's order, by the rank's own clock.
    """
    offsets = shifts(schedule.ranks, gaps(schedule, start, end))
    first = min((row[0] + shift for row, shift in zip(start, offsets, strict=True) if row), default=0.0)
    offsets = tuple(shift - first for shift in offsets)
    return Aligned(_moved(start, offsets), _moved(end, offsets), offsets)


def _moved(rows: Sequence[Sequence[float]], by: Sequence[float]) -> Times:
    return tuple(tuple(time + shift for time in row) for row, shift in zip(rows, by, strict=True))


def gaps(schedule: Schedule, start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> Gaps:
    """Finds the gaps between all pairs of ranks where one waits for the other; see :func:`aligned`."""
    placement = schedule.placement
    places, needs = slots(placement, schedule.microbatches), awaited_elsewhere(schedule)
    ended = [0.0] * (len(KINDS) * placement.stages * schedule.microbatches)
    for row, times in zip(schedule.order, end, strict=True):
        for (stage, kind, m), at in zip(row, times, strict=True):
            ended[places[kind][stage] + m] = at
    smallest: dict[tuple[int, int], float] = {}
    for rank, (row, times) in enumerate(zip(schedule.order, start, strict=True)):
        for (stage, kind, m), at in zip(row, times, strict=True):
            for source, place in needs[stage, kind]:
                gap, pair = at - ended[place + m], (source, rank)
                smallest[pair] = min(gap, smallest.get(pair, gap))
    return smallest


def latencies(iterations: Sequence[Gaps]) -> Latencies:
    """Median latency over iterations of each pair with messages both ways, never below 0."""
    by_pair: dict[tuple[int, int], list[float]] = defaultdict(list)
    for of_one in iterations:
        for (source, to), gap in of_one.items():
            if (to, source) in of_one:
                by_pair[source, to].append(max(0.0, (gap + of_one[to, source]) / 2))
    return {pair: statistics.median(times) for pair, times in sorted(by_pair.items())}


def shifts(ranks: int, of_pairs: Gaps) -> tuple[float, ...]:
    """Returns the offsets that put each rank's times on rank 0's clock.

    Pairs with the least latency are the most certain, so ranks are joined along those. If messages of a pair always
    waited for passes, half the difference is only a guess. Later ranks are then shifted until no pass starts before the
    passes that it waits for have ended.
    """
    shift = _along_the_tightest(ranks, of_pairs)
    for _ in range(ranks):
        late = [(to, shift[source] - gap) for (source, to), gap in of_pairs.items() if shift[to] < shift[source] - gap]
        if not late:
            break
        for to, earliest in late:
            shift[to] = max(shift[to], earliest)
    return tuple(shift)


def _along_the_tightest(ranks: int, of_pairs: Gaps) -> list[float]:
    """Offsets along the tree that joins ranks by their pairs of least latency; 0 for ranks outside."""
    width = {pair: gap + of_pairs[pair[::-1]] for pair, gap in of_pairs.items() if pair[::-1] in of_pairs}
    shift = [0.0] * ranks
    joined = {0}
    while open_pairs := [pair for pair in width if pair[0] in joined and pair[1] not in joined]:
        near, far = min(open_pairs, key=lambda pair: (width[pair], pair))
        shift[far] = shift[near] + (of_pairs[far, near] - of_pairs[near, far]) / 2
        joined.add(far)
    return shift
