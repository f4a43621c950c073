"""Text in drawings: its width in DejaVu Sans, which is as wide as any font used, and its markup in SVG and HTML."""

from __future__ import annotations

from html import escape

from megatron.schedules.utils.printable import printable

# Widths over the font size, rounded up. Digits and most small letters have the default width.
_WIDTHS = {0.3: "'ijlIJ", 0.37: " ,./:;\\|f-", 0.42: "()[]t!r", 0.56: '"*_`sz?cL', 0.7: "AVBRXZCK", 0.79: "UHNDG&OQ"}
_WIDTHS |= {0.87: "w#+<=>^~M", 1.0: "%m@W"}
_USUAL, _UNKNOWN = 0.64, 1.0
_OF = {letter: wide for wide, letters in _WIDTHS.items() for letter in letters}


def width(text: str, size: float) -> float:
    """Returns the width of ``text`` in letters of ``size``, rounded up a little."""
    return size * sum(_OF.get(letter, _USUAL if letter.isascii() else _UNKNOWN) for letter in text)


def lines(text: str, size: float, room: float) -> list[str]:
    """Breaks ``text`` into lines no wider than ``room``. A single wider word is a line of its own."""
    found: list[str] = []
    for word in text.split():
        longer = f"{found[-1]} {word}" if found else ""
        if longer and width(longer, size) <= room:
            found[-1] = longer
        else:
            found.append(word)
    return found


def markup(text: str) -> str:
    """Escapes ``text`` for an element or an attribute of XML or HTML, and makes it printable."""
    return escape(printable(text))
