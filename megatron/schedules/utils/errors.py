"""The one error planning raises: its message is a single line meant for the person who asked."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.schedules.utils.printable import printable

# Longer words are numbers or lists that nobody wants to see whole; a path may be long.
_LONGEST_WORD = 200
# A longer message quotes a file.
_LONGEST_MESSAGE = 4000


class PlanError(ValueError):
    """A request, a schedule or a file that cannot be planned; ``str(error)`` says what, and what would work.

    Args:
        message: one line.
        about: the part of the request that is wrong, by the name of its field in :class:`.Request` or :class:`.Costs`;
            who asked knows by what flag it was given.
    """

    def __init__(self, message: str, about: str | None = None) -> None:
        super().__init__(message)
        self.about = about

    def told(self, flags: Mapping[str, str]) -> str:
        """The message, preceded by the flag that it is about.

        Args:
            flags: the flag of each part of a request, as whoever asked writes it.
        """
        flag = flags.get(self.about or "")
        return str(self) if flag is None or str(self).startswith(flag) else f"{flag}: {self}"


def one_line(message: str) -> str:
    """``message`` on one line of printable characters; very long words and messages are cut in their middle."""
    shown = re.sub(
        rf"\S{{{_LONGEST_WORD},}}",
        lambda word: f"{word[0][:40]}...{word[0][-20:]}",
        printable(" ".join(message.split())),
    )
    half = _LONGEST_MESSAGE // 2
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:half]} ... {shown[-half:]}"
