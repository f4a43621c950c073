"""Progress: how whoever plans for a while says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]
"""Told what share of all the work has been done since it was told last."""


def unheard(share: float) -> None:
    """For whoever does not want to know."""


class Parts:
    """Tells of work that is done in parts, of each of which it is known how much it is at most.

    The shares told add up to 1 when the work ends: what a part does not need is told as it ends, and no part tells more
    than its own.

    Args:
        progress: hears of all of it.
        total: the sum of what the parts are at most, in any unit.
    """

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total = progress, total
        self._begun = self._told = 0.0

    def begin(self, amount: float) -> Progress:
        """Ends the part before this one; returns what hears of shares of this part of ``amount``."""
        self._reach(self._begun)
        start, self._begun = self._begun, self._begun + amount
        done = 0.0

        def hear(share: float) -> None:
            nonlocal done
            done += share
            self._reach(start + min(1.0, done) * amount)

        return hear

    def end(self) -> None:
        """Ends the last part, and with it the work."""
        self._reach(self._total)

    def _reach(self, done: float) -> None:
        if done > self._told:
            self._progress((done - self._told) / self._total)
            self._told = done
