"""Text in drawings: its width, as in DejaVu Sans, which is as wide as any font shown, and its form in SVG and HTML."""

from __future__ import annotations

from html import escape

from megatron.schedules.utils.printable import printable

# Widths over the size of the letters, rounded up; digits and most small letters have the usual one.
_WIDTHS = {0.3: "'ijlIJ", 0.37: " ,./:;\\|f-", 0.42: "()[]t!r", 0.56: '"*_`sz?cL', 0.7: "AVBRXZCK", 0.79: "UHNDG&OQ"}
_WIDTHS |= {0.87: "w#+<=>^~M", 1.0: "%m@W"}
_USUAL, _UNKNOWN = 0.64, 1.0
_OF = {letter: wide for wide, letters in _WIDTHS.items() for letter in letters}


def width(text: str, size: float) -> float:
    """Width of ``text`` in letters of ``size``, or a little more."""
    return size * sum(_OF.get(letter, _USUAL if letter.isascii() else _UNKNOWN) for letter in text)


def lines(text: str, size: float, room: float) -> list[str]:
    """``text`` in lines that are no wider than ``room``, where no word alone is."""
    found: list[str] = []
    for word in text.split():
        longer = f"{found[-1]} {word}" if found else ""
        if longer and width(longer, size) <= room:
            found[-1] = longer
        else:
            found.append(word)
    return found


def markup(text: str) -> str:
    """``text`` as it stands in an element or an attribute of XML or HTML: printable, and with nothing of either's."""
    return escape(printable(text))
