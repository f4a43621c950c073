"""Ranks that take longer than they did: told from the noise of single iterations, and from all growing slower alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Slower than others by this, in so many logged iterations one after another.
_SLOW = 1.2
_TIMES = 3


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
    """

    def __init__(self, rank_of: Sequence[int]) -> None:
        self._rank_of = rank_of
        self._first: list[list[float]] = []
        self._before: list[float] | None = None
        self._in_a_row = [0] * (max(rank_of) + 1)

    def expect(self, stages: Sequence[float] | None = None) -> None:
        """From now on compare with ``stages``, or with the iterations to come."""
        self._first, self._before = [], None if stages is None else self._by_rank(stages)
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
