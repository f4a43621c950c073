"""Colours that can be told apart and read on."""

from __future__ import annotations

from itertools import combinations

import pytest

from megatron.schedules.report import palette
from megatron.schedules.schedule.kinds import Kind


def contrast(first: palette.Rgb, second: palette.Rgb) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: palette.Rgb) -> float:
        parts = [c / 255 for c in colour]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_microbatch_number_reads_on_every_cell(kind, chunks):
    for chunk in range(chunks):
        background = palette.fill(kind, chunk, chunks)
        assert contrast(background, palette.ink(background)) >= 4.5


def test_two_chunks_of_all_kinds_are_different_colours():
    colours = [palette.fill(kind, chunk, 2) for kind in Kind for chunk in (0, 1)]
    for first, second in combinations(colours, 2):
        assert sum(abs(a - b) for a, b in zip(first, second, strict=True)) > 60
