"""Text in SVG and HTML."""

from __future__ import annotations

from html import escape

from megatron.schedules.utils.printable import printable


def markup(text: str) -> str:
    """``text`` as it stands in an element or an attribute of XML or HTML: printable, and with nothing of either's."""
    return escape(printable(text))
