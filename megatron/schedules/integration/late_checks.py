"""Result checks that are delayed until a program has ended, because reading a result waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Check = Callable[[], None]


class LateChecks:
    """Runs checks at once, or, during a program, at its end in the same order."""

    def __init__(self) -> None:
        self._waiting: list[Check] | None = None

    @property
    def waiting(self) -> bool:
        """True if a check would be delayed now."""
        return self._waiting is not None

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Delays checks inside the block and runs them after it, unless an error ends the block."""
        waiting: list[Check] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        for check in waiting:
            check()

    def add(self, check: Check) -> None:
        """Runs the check now or at the end of the program."""
        if self._waiting is None:
            check()
        else:
            self._waiting.append(check)
