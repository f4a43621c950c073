"""Widths of words as a font has them that is as wide as any that drawings are shown in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matplotlib
from PIL import ImageFont


@cache
def _font(bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), 1000)


def measured(text: str, size: float, *, bold: bool = False) -> float:
    """The width of ``text`` in DejaVu Sans of ``size``."""
    return _font(bold).getlength(text) * size / 1000
