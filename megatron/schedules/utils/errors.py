"""Error of planning, with a one-line message for the user."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.schedules.utils.printable import printable

# Words from this length on are shortened. They are numbers or lists; a path can be long, too.
_LONGEST_WORD = 200
# Longer messages, which quote a file, are shortened.
_LONGEST_MESSAGE = 4000


class PlanError(ValueError):
    """Error in a request, a schedule or a file. ``str(error)`` says what is wrong and what to do.

    Args:
        message: one line.
        about: field of :class:`.Request` or :class:`.Costs` that is wrong. The caller knows its flag.
    """

    def __init__(self, message: str, about: str | None = None) -> None:
        super().__init__(message)
        self.about = about

    def told(self, flags: Mapping[str, str]) -> str:
        """Returns the message, preceded by the flag that it is about.

        Args:
            flags: flag of each field, as the user writes it.
        """
        flag = flags.get(self.about or "")
        return str(self) if flag is None or str(self).startswith(flag) else f"{flag}: {self}"


class ShortMemoryError(PlanError):
    """A memory limit is too small for the plans that were asked for."""


def one_line(message: str) -> str:
    """Returns ``message`` on one line of printable characters, with very long words and messages shortened."""
    shown = re.sub(
        rf"\S{{{_LONGEST_WORD},}}",
        lambda word: f"{word[0][:40]}...{word[0][-20:]}",
        printable(" ".join(message.split())),
    )
    half = _LONGEST_MESSAGE // 2
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:half]} ... {shown[-half:]}"
