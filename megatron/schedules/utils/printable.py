"""Conversion of text from files, flags and the environment to printable text for terminals, logs, XML and HTML."""

from __future__ import annotations

# Longer names in headings are shortened.
_LONGEST_NAME = 80


def printable(text: str) -> str:
    r"""Returns ``text`` on one line of printable characters.

    Whitespace becomes a space, and other characters become escapes such as ``\x1b``. Not printable are control
    characters (terminals execute them, XML 1.0 forbids most), surrogates (no encoding has them) and characters that
    change the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def printable_name(text: str) -> str:
    """Returns :func:`printable` text, shortened in its middle if it is very long."""
    half = _LONGEST_NAME // 2
    if len(text) > _LONGEST_NAME:
        text = f"{text[: half - 2]}...{text[-half + 1 :]}"
    return printable(text)


def counted(count: int, noun: str) -> str:
    """Returns ``1 microbatch``, ``2 microbatches`` or ``4 ranks``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def percent(share: float, digits: int = 2) -> str:
    """Returns a share as a percentage: ``9.43 %`` for ``0.0943``."""
    rounded = round(100 * share, digits) or 0.0  # no -0.00
    return f"{rounded:.{digits}f} %"


def amount(number: float) -> str:
    """Writes bytes in GiB or MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.2f} MiB"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
