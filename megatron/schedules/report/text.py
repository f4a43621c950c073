"""Timelines in the terminal: a row for each rank, time to the right, memory at the end of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill

from rich.style import Style
from rich.text import Text

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
from megatron.schedules.report.views import Lane, copied, lanes
from megatron.schedules.schedule.kinds import COMPUTING, KINDS, Kind
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import amount, counted, percent, printable

_BAR = 8  # columns of a memory bar
_AMOUNT = 13  # columns of an amount in GiB
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SHADES = " ░▒▓█"
_PAGE = 78  # width of text, columns
_NARROWEST = 20  # least columns of time, even on a narrow terminal


def draw_text(
    timelines: Sequence[Timeline],
    width: int,
    colour: bool,
    labels: Sequence[str] = (),
    microbatch_bytes: float = 0.0,
) -> Text:
    """Draws ``timelines`` one below another on one time scale, each with its figures.

    If a column is no longer than the shortest pass, every pass is a cell, with its microbatch's number if it fits.
    Otherwise a column shows the share of its time that is busy and, with colours, the kinds of passes.

    Copies have their own lanes below the rank's computing.

    Args:
        timelines: at least one, of any sizes.
        width: columns, at least about 50.
        colour: use colours. Without, letters tell the kinds apart: F, I, W, B for a rank's even chunks, f, i, w, b for
            its odd ones.
        labels: a word for each timeline, to distinguish schedules of the same name.
        microbatch_bytes: bytes of a microbatch's activations on an average rank; 0 if unknown.
    """
    frame = _Frame(timelines, width, colour, microbatch_bytes)
    named = zip(timelines, labels or [""] * len(timelines), strict=True)
    parts = [frame.section(timeline, figures(timeline, microbatch_bytes), label) for timeline, label in named]
    return Text("\n").join([*parts, frame.legend()])


class _Frame:
    """Scales and looks that all timelines share."""

    def __init__(self, timelines: Sequence[Timeline], width: int, colour: bool, microbatch_bytes: float) -> None:
        self.colour = colour
        self.kinds = sorted(
            {kind for timeline in timelines for kind in timeline.schedule.kinds},
            key=list(KINDS).index,
        )
        self.chunks = max(timeline.schedule.placement.chunks for timeline in timelines)
        self.memory = max(max(timeline.peak, timeline.schedule.ranks) for timeline in timelines)
        self.gutter = max(len(f"rank {timeline.schedule.ranks - 1}") for timeline in timelines) + 2
        self.heading = "peak memory, microbatches" + " (GiB)" * bool(microbatch_bytes)
        self.amounts = _BAR + 8 + _AMOUNT * bool(microbatch_bytes)
        room = max(_NARROWEST, width - self.gutter - self.amounts)
        until = max(timeline.makespan for timeline in timelines)
        self.scale, self.cells = _scale(timelines, room / until)
        self.columns = math.ceil(until * self.scale - 1e-6)

    def section(self, timeline: Timeline, result: Figures, label: str) -> Text:
        """Returns one timeline: heading, a row for each rank, the time axis, the figures."""
        schedule = timeline.schedule
        text = Text()
        text.append(printable(f"{title(schedule.name)} {label}").rstrip(), Style(bold=True))
        text.append(
            f": {counted(schedule.ranks, 'pipeline rank')}, {counted(schedule.microbatches, 'microbatch')}, "
            f"{counted(schedule.placement.chunks, 'chunk')} a rank\n"
        )
        text.append(f"{self.heading}\n".rjust(self.gutter + self.columns + self.amounts), Style(dim=True))
        for rank in range(schedule.ranks):
            computing, *copies = lanes(timeline, rank)
            text.append(f"rank {rank}".ljust(self.gutter))
            row, below = self._lane(timeline, computing)
            text.append_text(row)
            text.append("  ")
            text.append(_bar(result.peaks[rank] / self.memory), Style(color="cyan" if self.colour else None))
            size = f" ({amount(result.peaks[rank] * result.microbatch_bytes)})" if result.microbatch_bytes else ""
            text.append(f" {number(result.peaks[rank])}{size}\n")
            if below is not None:
                text.append(" " * self.gutter + below + "\n")
            for kinds, lane in zip(copied(timeline), copies, strict=True):
                text.append(f"   {' '.join(kinds)}".ljust(self.gutter), Style(dim=True))
                text.append_text(self._lane(timeline, lane)[0])
                text.append("\n")
        text.append(" " * self.gutter + self._axis() + "\n", Style(dim=True))
        text.append(_summary(result))
        return text

    def legend(self) -> Text:
        """Meaning of the cells."""
        if self.cells or self.colour:
            line = self._meanings()
        else:
            line = Text(f"{_SHADES[1:]} busy for a quarter to all of a column's {number(1 / self.scale)} of time")
        if not self.cells:
            line.append("\npasses are shorter than a column: a wider terminal shows more, --format svg shows each")
        return line.append("\n")

    def _meanings(self) -> Text:
        line = Text()
        space = " " if self.colour else ""
        for kind in self.kinds:
            for chunk in range(self.chunks if self.colour else min(2, self.chunks)):
                line.append(f"{space}{_letter(kind, chunk)}{space}", self._style(kind, chunk, self.chunks))
                line.append("" if self.colour else " ")
            line.append(f"{space}{KINDS[kind].meaning}   ")
        line.rstrip()
        if self.chunks > 1 and self.colour:
            line.append("\nthe lighter a colour, the later the rank's chunk in the model")
        elif self.chunks > 1:
            more = self.chunks > 2
            line.append(f"\ncapitals: a rank's chunk 0{', 2 ...' if more else ''}")
            line.append(f", small letters: chunk 1{', 3 ...' if more else ''}")
        return line

    def _lane(self, timeline: Timeline, lane: Lane) -> tuple[Text, str | None]:
        """Returns the row of ``lane``, and the row below it if there is one."""
        schedule = timeline.schedule
        return self._cells(schedule, lane) if self.cells else (self._shades(schedule.placement, lane), None)

    def _cells(self, schedule: Schedule, lane: Lane) -> tuple[Text, str | None]:
        """Returns the passes of ``lane``, and their microbatches if these need a row of their own."""
        row, below, column = Text(), "", 0
        placement, digits = schedule.placement, len(str(schedule.microbatches - 1))
        room = digits + (digits > 1 and not self.colour)  # colours separate the numbers
        for work, start, end in lane:
            first, last = self._column(start), self._column(end)
            if first == last:  # a short copy; passes that compute have at least one column
                continue
            row.append(" " * (first - column))
            below += " " * (first - column)
            chunk = placement.chunk_of(work.stage)
            # Depends on the length only, because columns are rounded: passes of equal length then look alike.
            fits = room <= (end - start) * self.scale + 1e-6
            numbered = (str(work.microbatch) if fits else "").ljust(last - first)
            label = numbered if self.colour else _letter(work.kind, chunk) + "-" * (last - first - 1)
            row.append(label, self._style(work.kind, chunk, placement.chunks))
            below += numbered
            column = last
        row.append(" " * (self.columns - column))
        return row, None if self.colour else below.rstrip()

    def _shades(self, placement: Placement, lane: Lane) -> Text:
        """Returns a row with columns longer than a pass; each mixes the colours of its passes."""
        row, scale, columns = Text(), self.scale, self.columns
        shares: list[dict[tuple[Kind, int], float]] = [{} for _ in range(columns)]
        chunks = [placement.chunk_of(stage) for stage in range(placement.stages)]
        for (stage, kind, _), start, end in lane:
            look, first, last = (kind, chunks[stage]), start * scale, end * scale
            column = int(first)
            while first < last and column < columns:
                share, following = shares[column], column + 1
                until = last if last < following else following
                share[look] = share.get(look, 0.0) + until - first
                first, column = until, following
        for share in shares:
            busy = sum(share.values())
            if self.colour and busy:
                mixed = _mixture({palette.fill(*look, placement.chunks): part for look, part in share.items()})
                row.append(_SHADES[round(4 * min(1.0, busy))], Style(color=palette.hexadecimal(mixed)))
            else:
                row.append(_SHADES[round(4 * min(1.0, busy))])
        return row

    def _axis(self) -> str:
        line = ""
        for time in ticks(self.columns / self.scale, 8 / self.scale):
            line = line.ljust(self._column(time)) + number(time)
        return line[: self.columns + 2]

    def _column(self, time: float) -> int:
        return math.floor(time * self.scale + 0.5 + 1e-6)

    def _style(self, kind: Kind, chunk: int, chunks: int) -> Style:
        if not self.colour:
            return Style()
        background = palette.fill(kind, chunk, chunks)
        return Style(color=palette.hexadecimal(palette.ink(background)), bgcolor=palette.hexadecimal(background))


def _scale(timelines: Sequence[Timeline], widest: float) -> tuple[float, bool]:
    """Returns columns for a unit of time, at most ``widest``, and true if every pass has a column.

    If all durations are multiples of the shortest one, the shortest has an integer number of columns.
    """
    lengths = {
        round(length, 9)
        for timeline in timelines
        for kind, stage in {(work.kind, work.stage) for _, work in timeline.schedule.passes()}
        if kind in COMPUTING and (length := timeline.costs.durations[kind][stage]) > 0
    }
    shortest = min(lengths)
    columns = math.floor(widest * shortest + 1e-9)
    if columns < 1:
        return widest, False
    even = all(abs(length / shortest - round(length / shortest)) < 1e-6 for length in lengths)
    return (columns / shortest if even else widest), True


def _letter(kind: Kind, chunk: int) -> str:
    return kind.value.lower() if chunk % 2 else kind.value


def _mixture(parts: dict[palette.Rgb, float]) -> palette.Rgb:
    whole = sum(parts.values())
    red, green, blue = (round(sum(c[i] * part for c, part in parts.items()) / whole) for i in range(3))
    return red, green, blue


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return bar.ljust(_BAR)


def _summary(result: Figures) -> str:
    why = above_itself([result])
    return (
        f"bubble       {percent(result.bubble)} (iteration time {number(result.makespan)})\n"
        f"span bubble  {percent(result.span_bubble)}, on the worst rank from its own first start\n"
        f"peak memory  {microbatches(result.peak, result.microbatch_bytes)} of activations on rank {result.worst}"
        f"{f', {result.of_1f1b} {result.ranks}' if result.is_plain else ''}\n"
        f"{_savings(result)}" + (f"{fill(why, _PAGE)}\n" if why else "")
    )


def _savings(result: Figures) -> str:
    recompute = (
        f"recompute    {percent(result.recomputed)} of computing; without it {percent(result.useful)} of the time is "
        "useful\n"
    )
    copies = f"copying      {percent(result.copying)} of the time on the busiest copy channel\n"
    messages = (
        f"messages     {percent(result.hidden)} of the time hidden behind weight gradients, {percent(result.exposed)} "
        "exposed\n"
    )
    return recompute * (result.recomputed > 0) + copies * (result.copying > 0) + messages * result.has_messages
