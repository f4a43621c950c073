"""Ranks that take longer than they did: told from the noise of single iterations, and from all growing slower alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Slower than others by this, in so many logged iterations one after another.
_SLOW = 1.2
_TIMES = 3
# The bubble is larger by this share of the time.
_MORE_IDLE = 0.05
# A message takes so many times as long, and longer by this share of a usual pass.
_SLOW_HOP, _OF_A_PASS = 1.5, 0.05

Hops = Sequence[tuple[int, int, float]]


class Slow(NamedTuple):
    """A rank that has become slow.

    Args:
        rank: of the pipeline.
        ratio: how many times as long as before its passes take.
    """

    rank: int
    ratio: float


class SlowWatch:
    """Compares each rank's time for its passes with what it was: as profiled, or in the first iterations told of.

    A rank that is slow is told once; after :meth:`expect`, or once it has been quick again, anew.

    Args:
        rank_of: by stage, its rank.

    Attributes:
        since: what is compared with, in words.
    """

    def __init__(self, rank_of: Sequence[int]) -> None:
        self.since = "in the first iterations that were logged"
        self._rank_of = rank_of
        self._first: list[list[float]] = []
        self._before: list[float] | None = None
        self._in_a_row = [0] * (max(rank_of) + 1)

    def expect(self, stages: Sequence[float]) -> None:
        """From now on compare with ``stages``, as profiled."""
        self._before, self.since = self._by_rank(stages), "when it was profiled"
        self._in_a_row = [0] * len(self._in_a_row)

    def add(self, stages: Sequence[float]) -> list[Slow]:
        """Those that have been slow for long enough by now.

        Args:
            stages: by stage, how long all passes of an iteration took.
        """
        now = self._by_rank(stages)
        if self._before is None:
            self._first.append(now)
            if len(self._first) == _TIMES:
                self._before = list(map(statistics.median, zip(*self._first, strict=True)))
            return []
        ratios = [here / before if before else 1.0 for here, before in zip(now, self._before, strict=True)]
        usual = statistics.median_low(ratios)
        found = []
        for rank, ratio in enumerate(ratios):
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if ratio > _SLOW * usual and ratio > _SLOW else 0
            if self._in_a_row[rank] == _TIMES:
                found.append(Slow(rank, ratio))
        return found

    def _by_rank(self, stages: Sequence[float]) -> list[float]:
        ranks = [0.0] * len(self._in_a_row)
        for rank, time in zip(self._rank_of, stages, strict=True):
            ranks[rank] += time
        return ranks


class IdleWatch:
    """Tells when the bubble has grown, against the first iterations told of: where no rank is slow messages may be."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._in_a_row = 0

    def expect(self) -> None:
        """From now on compare with the iterations to come."""
        self._first, self._in_a_row = [], 0

    def add(self, bubble: float) -> bool:
        """Whether it has been larger for long enough by now; told once."""
        if len(self._first) < _TIMES:
            self._first.append(bubble)
            return False
        larger = bubble > statistics.median(self._first) + _MORE_IDLE
        self._in_a_row = self._in_a_row + 1 if larger else 0
        return self._in_a_row == _TIMES


def slow_links(before: Hops, now: Hops, usual_pass: float) -> list[tuple[int, int, float, float]]:
    """Hops that have become slow: from, to, how long they take and how long they took.

    Args:
        before, now: from, to, and latency.
        usual_pass: how long a pass takes, in the same unit: what is short beside it does not matter.
    """
    took = {(source, to): time for source, to, time in before}
    return [
        (source, to, time, took[source, to])
        for source, to, time in now
        if time > max(_SLOW_HOP * took.get((source, to), time), took.get((source, to), time) + _OF_A_PASS * usual_pass)
    ]
