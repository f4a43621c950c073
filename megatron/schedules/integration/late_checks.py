"""Checks of results that wait until a program has ended, since reading a result waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Check = Callable[[], None]


class LateChecks:
    """Makes calls at once or, while a program runs, at its end and in the same order."""

    def __init__(self) -> None:
        self._waiting: list[Check] | None = None

    @property
    def waiting(self) -> bool:
        """Whether a check would wait now."""
        return self._waiting is not None

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Collects the calls that come meanwhile; makes them afterwards, unless an error ends it."""
        waiting: list[Check] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        for check in waiting:
            check()

    def add(self, check: Check) -> None:
        """Makes the call, now or later."""
        if self._waiting is None:
            check()
        else:
            self._waiting.append(check)
