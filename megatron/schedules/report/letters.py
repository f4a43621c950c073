"""How much room words take: as in DejaVu Sans, which is as wide as any font that drawings are shown in."""

from __future__ import annotations

_NARROW = frozenset(" !'(),-./:;I J[\\]fijlrt|")
_CAPITALS = frozenset("&ABCDGHKMNOQRUVXZw#+<=>^~")


def width(text: str, size: float) -> float:
    """Width of ``text`` in letters of ``size``, or a little more."""
    return size * sum(map(_letter, text))


def _letter(letter: str) -> float:
    if letter in _NARROW:
        return 0.415
    if letter in _CAPITALS:
        return 0.865
    return 1.0 if letter in "%@Wm" or not letter.isascii() else 0.64


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
