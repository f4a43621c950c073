"""Look of drawings: letters, fonts and colours, with a hue for each kind of pass that is lighter with each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron.schedules.schedule.kinds import Kind
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
    rows: list[str] = []
    for word in text.split():
        longer = f"{rows[-1]} {word}" if rows else ""
        if longer and width(longer, size) <= room:
            rows[-1] = longer
        else:
            rows.append(word)
    return rows


def markup(text: str) -> str:
    """Escapes ``text`` for an element or an attribute of XML or HTML, and makes it printable."""
    return escape(printable(text))


Rgb = tuple[int, int, int]

FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
WHITE: Rgb = (255, 255, 255)
BLACK: Rgb = (0, 0, 0)

# Hues that colour-blind readers can distinguish, dark enough for a lighter second chunk.
HUES: dict[Kind, Rgb] = {
    Kind.F: (36, 99, 196),
    Kind.I: (214, 107, 24),
    Kind.W: (22, 133, 92),
    Kind.B: (154, 62, 142),
    Kind.S: (100, 0, 40),
    Kind.T: (100, 180, 0),
    Kind.R: (52, 40, 118),
    Kind.O: (2, 215, 234),
    Kind.L: (253, 225, 60),
}
# Share of white in the last chunk's colour.
_LIGHTEST = 0.55


def document(wide: int, height: str, size: str, heading: str, described: str, style: str, parts: Sequence[str]) -> str:
    """Returns an SVG of ``parts`` on a page, with plain texts as its title and description, and a style sheet."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" width="{wide}" '
        f'height="{height}" role="img" aria-labelledby="t d" font-family="{FONT}" font-size="{size}">\n'
        f'<title id="t">{markup(heading)}</title><desc id="d">{markup(described)}</desc>\n'
        f"<style>{style}</style>\n"
        f'<rect class="page" width="{wide}" height="{height}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def blend(first: Rgb, second: Rgb, share: float) -> Rgb:
    """Mixes ``share`` of ``second`` into ``first``."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def fill(kind: Kind, chunk: int, chunks: int) -> Rgb:
    """Returns the colour of a pass of ``kind`` of a rank's ``chunk``."""
    return blend(HUES[kind], WHITE, _LIGHTEST * chunk / max(1, chunks - 1))


def ink(background: Rgb) -> Rgb:
    """Returns black or white, the one with more contrast to ``background`` (WCAG 2): always 4.5 or more."""
    light = _luminance(background)
    on_white = (_luminance(WHITE) + 0.05) / (light + 0.05)
    on_black = (light + 0.05) / (_luminance(BLACK) + 0.05)
    return WHITE if on_white >= on_black else BLACK


def hexadecimal(colour: Rgb) -> str:
    """Formats a colour as ``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _luminance(colour: Rgb) -> float:
    channels = [c / 255 for c in colour]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
