"""Timelines as one self-contained SVG: schedules one below another on one time scale, each with its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.report import palette
from megatron.schedules.report.figures import (
    Figures,
    above_itself,
    figures,
    microbatches,
    number,
    ticks,
    title,
)
from megatron.schedules.report.palette import lines, markup, width
from megatron.schedules.report.views import Lane, copied, lanes
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import amount, counted, percent

_WIDTH = 960
_LEFT, _RIGHT = 66, 18
_MARGIN = 18
_HEADING, _MEMORY, _GAP = 30, 54, 22
_ROWS_TALL = 320  # height of a schedule's rows before they shrink below their best height
_ROW_BEST, _ROW_LEAST = 24, 7
_THIN = 0.22  # height of a copy lane over that of a row
_DIGIT = 0.64  # width of a digit over its font size, in the widest font
_READABLE = 6.0  # the smallest numbers
_BOLD = 1.13  # width of bold over regular text
_SIZE = 12  # default font size

# Light is the default. A viewer in dark mode gets dark. Both paint their own background, so that the drawing is
# readable on any page.
_LIGHT = {"page": "#ffffff", "lane": "#edf0f4", "text": "#1b1f26", "faint": "#5d6673", "memory": "#5b6bbf"}
_DARK = {"page": "#14171c", "lane": "#262b33", "text": "#e8ebf0", "faint": "#9aa4b2", "memory": "#93a1ec"}


def draw_svg(
    timelines: Sequence[Timeline],
    caption: str = "",
    *,
    labels: Sequence[str] = (),
    unit: str = "",
    microbatch_bytes: float = 0.0,
) -> str:
    """Draws ``timelines`` one below another.

    Below each schedule is the activation memory of the worst rank over time, with 1F1B's as a dashed line. Microbatches
    are numbered where the longest number fits.

    Args:
        timelines: at least one, of any sizes. All have the same scale of time and of memory.
        caption: a line for the bottom.
        labels: a word for each timeline, to distinguish schedules of the same name.
        unit: unit of time; empty if unknown.
        microbatch_bytes: bytes of a microbatch's activations on an average rank; 0 if unknown.
    """
    sheet = _Sheet([figures(timeline, microbatch_bytes) for timeline in timelines], timelines, unit)
    for timeline, result, label in zip(timelines, sheet.results, labels or [""] * len(timelines), strict=True):
        sheet.section(timeline, result, label)
    sheet.axis()
    sheet.legend()
    sheet.caption(caption)
    return sheet.finished()


class _Look(NamedTuple):
    """Kind and chunk of a cell, which determine its colour."""

    kind: Kind
    chunk: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.kind.value.lower()}{self.chunk}of{self.chunks}"


class _Cells:
    """Cells of one schedule, grouped by their look, and the numbers on them.

    In one row either all cells of a look have numbers or none. None has, if the longest number does not fit the
    narrowest cell.

    Args:
        size: largest font size of the numbers.
    """

    def __init__(self, sheet: _Sheet, schedule: Schedule, size: float) -> None:
        self._sheet, self._placement, self._size = sheet, schedule.placement, size
        self._wide = len(str(schedule.microbatches - 1)) * _DIGIT
        self._paths: dict[_Look, list[str]] = {}
        self._numbers: dict[tuple[float, _Look], list[tuple[float, float, int]]] = {}
        self._narrowest = math.inf

    def add(self, lane: Lane, top: float, height: float) -> None:
        """Adds a cell for each pass in ``lane``, with its microbatch if it fits."""
        for work, start, end in lane:
            left, width = self._sheet.x(start), (end - start) * self._sheet.scale
            self._narrowest = min(self._narrowest, width)
            look = _Look(work.kind, self._placement.chunk_of(work.stage), self._placement.chunks)
            self._sheet.looks[look] = palette.fill(*look)
            self._paths.setdefault(look, []).append(f"M{_n(left)} {_n(top)}h{_n(width)}v{_n(height)}h{_n(-width)}z")
            if height > self._size:
                self._numbers.setdefault((top + height / 2, look), []).append((left, width, work.microbatch))

    def drawn(self) -> Iterator[str]:
        """Yields the paths, then the numbers on them."""
        # Lines between cells must not hide narrow cells.
        line = 0.8 if self._narrowest > 6 else 0.3 if self._narrowest > 3 else 0
        for look, paths in sorted(self._paths.items()):
            yield f'<path class="cell {look}" stroke-width="{line}" d="{"".join(paths)}"/>'
        # Font size for the numbers of each row and look. If all are readable, one size is used.
        largest = {row: (min(width for _, width, _ in cells) - 1) / self._wide for row, cells in self._numbers.items()}
        size = min([self._size, *(fitting for fitting in largest.values() if fitting >= _READABLE)])
        labels: dict[str, list[str]] = {}
        for (middle, look), cells in self._numbers.items() if size >= _READABLE else ():
            if largest[middle, look] >= size:
                labels.setdefault(palette.hexadecimal(palette.ink(self._sheet.looks[look])), []).extend(
                    f'<text x="{_n(left + width / 2)}" y="{_n(middle + size * 0.36)}">{microbatch}</text>'
                    for left, width, microbatch in cells
                )
        self._sheet.numbered |= bool(labels)
        for colour, texts in labels.items():
            yield f'<g fill="{colour}" font-size="{_n(size)}" text-anchor="middle">{"".join(texts)}</g>'


class _Sheet:
    """An SVG filled from top to bottom; ``y`` is the next free position."""

    def __init__(self, results: list[Figures], timelines: Sequence[Timeline], unit: str) -> None:
        self.results, self.unit = results, unit
        self.chunks = max(timeline.schedule.placement.chunks for timeline in timelines)
        self.until = max(timeline.makespan for timeline in timelines)
        self.scale = (_WIDTH - _LEFT - _RIGHT) / self.until
        self.memory = max(max(timeline.peak, timeline.schedule.ranks) for timeline in timelines)
        self.y = float(_MARGIN - 6)
        self.parts: list[str] = []
        self.looks: dict[_Look, palette.Rgb] = {}
        self.numbered = False

    def section(self, timeline: Timeline, result: Figures, label: str) -> None:
        """Draws the heading, a row for each rank, and the memory of the worst rank."""
        shares = [amount(result.peak_bytes)] * (result.peak_bytes > 0)
        shares += [result.of_1f1b] * (result.is_plain and result.name != "1f1b")
        held = microbatches(result.peak) + (f" ({', '.join(shares)})" if shares else "")
        name, savings = f"{title(result.name)} {label}".rstrip(), _savings(result)
        heading = (
            f'<tspan class="name">{markup(name)}</tspan>'
            f'<tspan class="faint" dx="12">bubble</tspan>'
            f'<tspan class="figure" dx="5">{percent(result.bubble, 1)}</tspan>'
            f'<tspan class="faint" dx="12">activation memory</tspan><tspan class="figure" dx="5">{held}</tspan>'
        )
        said = " ".join(["bubble 00.0 %  activation memory", held, *(f"{what}  00.0 %" for what, _ in result.savings)])
        if _BOLD * (width(name, 16) + width(said, 13)) > _WIDTH - 2 * _MARGIN and savings:
            self.text(_MARGIN, self.y + 18, heading, "head")
            self.y += 20
            heading, savings = savings, ""
        self.text(_MARGIN, self.y + 18, heading + savings, "head")
        self.y += _HEADING
        self.rows(timeline)
        self.y += 8
        self.curve(timeline, result.worst, result.peak)
        self.y += _GAP

    def rows(self, timeline: Timeline) -> None:
        """Draws the passes: one path with all cells of each look (kind and chunk), then the numbers."""
        schedule, channels = timeline.schedule, len(copied(timeline))
        row = min(_ROW_BEST, max(_ROW_LEAST, _ROWS_TALL / schedule.ranks))
        pitch = row * (1 + _THIN * channels) + (2 if channels else 0)
        size = min(11.0, row - 8)
        # A label needs about 11 pixels. With lower rows only every second, fourth ... rank has one.
        every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * pitch >= 11)
        height, thin = row - (2 if row > 14 else 1), row * _THIN
        cells = _Cells(self, schedule, size)
        for rank in range(schedule.ranks):
            top = self.y + rank * pitch
            computing, *copies = lanes(timeline, rank)
            self.lane(timeline, top, height)
            cells.add(computing, top, height)
            for index, lane in enumerate(copies):
                below = top + height + index * thin + 0.5
                self.lane(timeline, below, thin - 0.5)
                cells.add(lane, below, thin - 0.5)
            if rank % every == 0:
                self.text(_LEFT - 8, top + height / 2 + 3.8, f"rank {rank}", "faint end")
        self.parts += cells.drawn()
        self.y += schedule.ranks * pitch

    def lane(self, timeline: Timeline, top: float, height: float) -> None:
        """Draws the background of a lane, up to the end of the schedule."""
        wide = self.x(timeline.makespan) - _LEFT
        self.parts.append(f'<rect class="lane" x="{_LEFT}" y="{_n(top)}" width="{_n(wide)}" height="{_n(height)}"/>')

    def curve(self, timeline: Timeline, rank: int, peak: float) -> None:
        """Draws the activation memory of ``rank`` over time as an area."""
        floor = self.y + _MEMORY

        def level(held: float) -> float:
            return floor - held / self.memory * (_MEMORY - 8)

        # Memory freed and allocated at the same time is summed.
        steps = [*dict(timeline.memory(rank)).items(), (timeline.makespan, 0.0)]
        path = f"M{_n(self.x(0))} {_n(floor)}"
        for (_, held), (time, _) in pairwise(steps):
            path += f"V{_n(level(held))}H{_n(self.x(time))}"
        self.parts.append(f'<path class="area" d="{path}V{_n(floor)}z"/>')
        reference = timeline.schedule.ranks
        line = _n(level(reference))
        self.parts.append(f'<path class="limit" d="M{_LEFT} {line}H{_WIDTH - _RIGHT}"/>')
        self.text(_WIDTH - _RIGHT, level(reference) - 3.5, f"1F1B holds {microbatches(reference)}", "faint end small")
        self.text(_LEFT - 8, level(peak) + 4, number(peak), "figure end")
        # Below the number of the peak where there is room, above it where the curve is low.
        words = floor if level(peak) < floor - 28 else level(peak) - 10
        self.text(_LEFT - 8, words - 12, "memory", "faint end small")
        self.text(_LEFT - 8, words, f"rank {rank}", "faint end small")
        self.y = floor

    def axis(self) -> None:
        """Draws round times along the bottom."""
        self.y -= _GAP - 4
        marks = ticks(self.until, 55 / self.scale)
        path = "".join(f"M{_n(self.x(time))} {_n(self.y)}v4" for time in marks)
        self.parts.append(f'<path class="axis" d="M{_LEFT} {_n(self.y)}H{_WIDTH - _RIGHT}{path}"/>')
        for time in marks:
            self.text(self.x(time), self.y + 15, number(time), "faint middle small")
        words = f"time, {self.unit}" if self.unit else "time"
        self.text(_LEFT - 8, self.y + 15, markup(words), "faint end small")
        self.y += 22

    def legend(self) -> None:
        """Draws a swatch for each kind and chunk in the drawing."""
        x, self.y = float(_LEFT), self.y + 8
        for kind, (meaning, *_) in KINDS.items():
            shades = sorted({colour for look, colour in self.looks.items() if look.kind is kind})
            label = f"{kind} {meaning}"
            wide = 13 * len(shades) + 6 + width(label, _SIZE) + 14
            if shades and x + wide > _WIDTH:
                x, self.y = float(_LEFT), self.y + 20
            for colour in shades:
                self.parts.append(
                    f'<rect fill="{palette.hexadecimal(colour)}" x="{_n(x)}" y="{_n(self.y)}" width="13" height="13"/>'
                )
                x += 13
            if shades:
                self.text(x + 6, self.y + 11, label, "faint")
                x += wide - 13 * len(shades)
        if self.chunks > 1:
            words = "lighter: later chunk"
            if x + width(words, _SIZE) > _WIDTH - _RIGHT:
                x, self.y = float(_LEFT), self.y + 20
            self.text(x, self.y + 11, words, "faint")
        self.y += 22

    def caption(self, caption: str) -> None:
        """Draws the caption and the meaning of the numbers, in as many lines as needed."""
        caption += " Numbers in cells are microbatches." * self.numbered
        for line in lines(f"{caption} {above_itself(self.results)}", _SIZE, _WIDTH - _LEFT - _RIGHT):
            self.text(_LEFT, self.y + 10, markup(line), "faint")
            self.y += 20

    def text(self, x: float, y: float, content: str, look: str) -> None:
        """Draws a line of text; ``content`` is markup."""
        self.parts.append(f'<text class="{look}" x="{_n(x)}" y="{_n(y)}">{content}</text>')

    def x(self, time: float) -> float:
        """Horizontal position of a time."""
        return _LEFT + time * self.scale

    def finished(self) -> str:
        """Returns the whole document."""
        height = _n(self.y + _MARGIN - 8)
        heading = " and ".join(dict.fromkeys(title(plan.name) for plan in self.results))
        described = "; ".join(
            f"{title(plan.name)} on {counted(plan.ranks, 'rank')} with {counted(plan.microbatches, 'microbatch')}: "
            f"bubble {percent(plan.bubble, 1)}, activation memory "
            + (plan.of_1f1b.removesuffix("'s") or amount(plan.peak_bytes))
            + "".join(f", {name} {percent(share, 1)}" for name, share in plan.savings)
            for plan in self.results
        )
        return palette.document(_WIDTH, height, f"{_SIZE}", heading, described, self.style(), self.parts)

    def style(self) -> str:
        """Returns the style sheet: shapes, cell colours, and the light and dark schemes."""
        cells = "".join(f".{look}{{fill:{palette.hexadecimal(rgb)}}}" for look, rgb in self.looks.items())
        return (
            ".head{font-size:13px}.name{font-size:16px;font-weight:700}.figure{font-weight:600}.small{font-size:11px}"
            ".end{text-anchor:end}.middle{text-anchor:middle}.area{fill-opacity:.3;stroke-width:1.2}"
            ".limit{fill:none;stroke-dasharray:5 4}.axis{fill:none}"
            f"{cells}{_scheme(_LIGHT)}@media (prefers-color-scheme:dark){{{_scheme(_DARK)}}}"
        )


def _savings(result: Figures) -> str:
    """Returns recompute and copies for the heading."""
    return "".join(
        f'<tspan class="faint" dx="9">{name}</tspan><tspan class="figure" dx="5">{percent(share, 1)}</tspan>'
        for name, share in result.savings
    )


def _scheme(colours: dict[str, str]) -> str:
    return (
        ".page{{fill:{page}}}.lane{{fill:{lane}}}.cell{{stroke:{page}}}text{{fill:{text}}}g text{{fill:inherit}}"
        ".faint{{fill:{faint}}}.area{{fill:{memory};stroke:{memory}}}.limit,.axis{{stroke:{faint}}}"
    ).format(**colours)


def _n(value: float) -> str:
    """Formats a coordinate to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
