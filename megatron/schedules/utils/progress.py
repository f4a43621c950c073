"""Progress reports of planning."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Progress = Callable[[float], None]
"""Callback that receives the share of the whole work completed since its last call."""


def unheard(share: float) -> None:
    """Ignores progress."""


def one_at_a_time(progress: Progress) -> Progress:
    """Returns ``progress`` for several threads, which wait for one another."""
    lock = Lock()

    def hear(share: float) -> None:
        with lock:
            progress(share)

    return hear


class Parts:
    """Reports the progress of work that has several parts, each with a known maximum amount.

    The reported shares sum to 1 when the work ends. A part that ends early is reported as complete, and no part
    reports more than its own amount.

    Args:
        progress: callback for the whole work.
        total: sum of the parts' maximum amounts, in any unit.
    """

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total = progress, total
        self._begun = self._told = 0.0

    def begin(self, amount: float) -> Progress:
        """Ends the previous part and begins one of ``amount``; returns the callback for shares of it."""
        self._reach(self._begun)
        start, self._begun = self._begun, self._begun + amount
        done = 0.0

        def hear(share: float) -> None:
            nonlocal done
            done += share
            self._reach(start + min(1.0, done) * amount)

        return hear

    def end(self) -> None:
        """Ends the last part and the whole work."""
        self._reach(self._total)

    def _reach(self, done: float) -> None:
        if done > self._told:
            self._progress((done - self._told) / self._total)
            self._told = done
