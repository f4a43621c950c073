"""Text from files, flags and the environment, made fit to be shown on a terminal, in a log, in XML and in HTML."""

from __future__ import annotations

# A name that is longer says nothing more in a heading.
_LONGEST_NAME = 80


def printable(text: str) -> str:
    r"""``text`` on one line of printable characters; every other character is shown by its escape, such as ``\x1b``.

    What is printable has no control character (a terminal would obey it, XML 1.0 forbids most), no half of a surrogate
    pair (no encoding has one) and nothing that changes the direction of text. Whitespace of any kind becomes a space.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def printable_name(text: str) -> str:
    """``text`` as :func:`printable` has it, a very long one cut in its middle."""
    half = _LONGEST_NAME // 2
    if len(text) > _LONGEST_NAME:
        text = f"{text[: half - 2]}...{text[-half + 1 :]}"
    return printable(text)


def counted(count: int, noun: str) -> str:
    """``1 microbatch`` or ``2 microbatches``; ``4 ranks``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def percent(share: float, digits: int = 2) -> str:
    """``0.0943`` as ``9.43 %``."""
    return f"{100 * share:.{digits}f} %"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
