"""Detects ranks, and links, that have become slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# A rank is slow if it is slower than the others by this factor in this number of consecutive logged iterations.
_SLOW = 1.2
_TIMES = 3
# Increase of the bubble ratio that is reported.
_MORE_IDLE = 0.05
# A link is slow if its latency grew by this factor and by this share of an average pass.
_SLOW_LINK, _OF_A_PASS = 1.5, 0.05

Latencies = Sequence[tuple[int, int, float]]


class Slow(NamedTuple):
    """A rank that has become slow.

    Args:
        rank: rank in the pipeline.
        ratio: time of its passes over the time before.
    """

    rank: int
    ratio: float


class SlowWatch:
    """Compares each rank's time with a base: its profile, or the first iterations.

    A slow rank is reported once, and again after :meth:`expect` or after it has recovered.

    Args:
        rank_of: rank of each stage.

    Attributes:
        since: base of the comparison, in words.
    """

    def __init__(self, rank_of: Sequence[int]) -> None:
        self.since = "in the first iterations that were logged"
        self._rank_of = rank_of
        self._first: list[list[float]] = []
        self._before: list[float] | None = None
        self._in_a_row = [0] * (max(rank_of) + 1)

    def expect(self, stages: Sequence[float]) -> None:
        """Sets the profiled times ``stages`` as the base from now on."""
        self._before, self.since = self._by_rank(stages), "when it was profiled"
        self._in_a_row = [0] * len(self._in_a_row)

    def add(self, stages: Sequence[float]) -> list[Slow]:
        """Returns the ranks that have just become slow.

        Args:
            stages: time of all passes of each stage in an iteration.
        """
        now = self._by_rank(stages)
        if self._before is None:
            self._first.append(now)
            if len(self._first) == _TIMES:
                self._before = list(map(statistics.median, zip(*self._first, strict=True)))
            return []
        ratios = [here / before if before else 1.0 for here, before in zip(now, self._before, strict=True)]
        usual = statistics.median_low(ratios)
        slow = []
        for rank, ratio in enumerate(ratios):
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if ratio > _SLOW * usual and ratio > _SLOW else 0
            if self._in_a_row[rank] == _TIMES:
                slow.append(Slow(rank, ratio))
        return slow

    def _by_rank(self, stages: Sequence[float]) -> list[float]:
        ranks = [0.0] * len(self._in_a_row)
        for rank, time in zip(self._rank_of, stages, strict=True):
            ranks[rank] += time
        return ranks


class IdleWatch:
    """Detects a bubble that has grown since the first iterations.

    If no rank is slow, slow messages may be the cause.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._in_a_row = 0

    def expect(self) -> None:
        """Sets the next iterations as the base from now on."""
        self._first, self._in_a_row = [], 0

    def add(self, bubble: float) -> bool:
        """Returns true if the bubble has just been larger for long enough."""
        if len(self._first) < _TIMES:
            self._first.append(bubble)
            return False
        larger = bubble > statistics.median(self._first) + _MORE_IDLE
        self._in_a_row = self._in_a_row + 1 if larger else 0
        return self._in_a_row == _TIMES


def slow_links(before: Latencies, now: Latencies, usual_pass: float) -> list[tuple[int, int, float, float]]:
    """Finds links that have become slow: sending rank, receiving rank, latency now and before.

    Args:
        before, now: latencies of the links.
        usual_pass: time of an average pass in the same unit; much shorter latencies do not matter.
    """
    took = {(source, to): time for source, to, time in before}
    return [
        (source, to, time, took[source, to])
        for source, to, time in now
        if time > max(_SLOW_LINK * took.get((source, to), time), took.get((source, to), time) + _OF_A_PASS * usual_pass)
    ]
