"""Bubble against activation memory as one self-contained SVG: a frontier, its bound, and single schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megatron.schedules.report import palette
from megatron.schedules.report.figures import Figures, number, ticks, title
from megatron.schedules.report.palette import lines, markup, width
from megatron.schedules.report.table import Row
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import amount

_WIDTH = 960
_LEFT, _RIGHT, _TOP, _FLOOR = 58, _WIDTH - 24, 56, 482
_SIZE = 11.0
_NEAR = 4.0  # points closer than this share a label
_BEYOND = 1.1  # axis end over the largest memory and bubble, so that no point lies on an edge
# Page, grid, text, faint text, ours, other projects', and ours with recompute and with offload.
_LIGHT = ("#ffffff", "#e4e8ee", "#1b1f26", "#5d6673", "#2463c4", "#b4540a", "#7a3e9d", "#16855c")
_DARK = ("#14171c", "#2b313a", "#e8ebf0", "#9aa4b2", "#7fb0ff", "#f0a060", "#c79be6", "#5cc79a")
_OURS = '<circle class="ours" cx="{x}" cy="{y}" r="4"/>'
_OTHER = '<path class="other" d="M{x} {y}m0 -5l5 5l-5 5l-5 -5z"/>'
_LEGEND = {
    '<path class="curve" d="M{x} {y}h18"/>': "adaptive",
    '<path class="bound" d="M{x} {y}h18"/>': "its lower bound",
    '<path class="again" d="M{x} {y}h18"/>': "with recompute",
    '<path class="offload" d="M{x} {y}h18"/>': "with offload",
    _OURS: "ours by name",
    _OTHER: "other projects",
}

Box = tuple[float, float, float, float]  # left, top, right, bottom


class Mark(NamedTuple):
    """One schedule to draw.

    Args:
        name: name of the schedule.
        project: its project; empty for ours.
        memory: peak activation memory, in microbatches.
        bubble: bubble ratio.
    """

    name: str
    project: str
    memory: float
    bubble: float


class Point(NamedTuple):
    """The best plan for one memory limit, and the lower bound of its bubble."""

    memory: float
    bubble: float
    bound: float


class Shortest(NamedTuple):
    """The shortest plan for a memory limit, and the share of its time that is idle or recompute."""

    memory: float
    lost: float


def draw_frontier(
    curve: Sequence[Point],
    marks: Sequence[Mark],
    heading: str,
    caption: str,
    most: tuple[float, float],
    saved: Mapping[str, Sequence[Shortest]] = MappingProxyType({}),
    unit: str = "microbatches",
) -> str:
    """Draws ``curve`` as steps, its bound as a dashed line, and ``marks`` with labels that do not overlap.

    A plan within a limit is also within every larger one, and a plan without memory saving is always allowed. So a
    curve never rises, and never lies above the curve without savings.

    Args:
        curve: points by ascending memory.
        marks: single schedules; those beyond ``most`` are left out.
        heading: line above the drawing.
        caption: line below the drawing.
        most: the largest memory and the largest bubble of the drawing.
        saved: the curves "again" (with recompute) and "offload", if measured.
        unit: unit of memory, in words.
    """
    chart = _Chart(*most)
    chart.axes(unit)
    plain = [Shortest(point.memory, point.bubble) for point in curve]
    chart.bound(curve)
    for look, points in {"curve": plain, **{look: [*plain, *points] for look, points in saved.items()}}.items():
        chart.steps(look, lowest(points))
    chart.marks([mark for mark in marks if mark.memory <= chart.memory and mark.bubble <= chart.bubble])
    height = _n(chart.words(heading, caption))
    return palette.document(_WIDTH, height, _n(_SIZE), heading, caption, _style(), chart.parts)


def lowest(points: Sequence[Shortest]) -> list[Shortest]:
    """Returns the lowest result for each limit or a smaller one, by ascending memory."""
    best: dict[float, float] = {}
    least = math.inf
    for memory, lost in sorted(points):
        best[memory] = least = min(least, lost)
    return [Shortest(memory, lost) for memory, lost in best.items()]


class _Chart:
    """Area up to a largest memory and bubble, and the boxes in it that labels should not cover."""

    def __init__(self, memory: float, bubble: float) -> None:
        self.memory, self.bubble = memory, bubble
        self.parts: list[str] = []
        self.taken: list[Box] = []
        self.looks: set[str] = set()  # looks drawn so far, for the legend

    def axes(self, unit: str) -> None:
        """Draws a grid with round numbers."""
        for percent in ticks(100 * self.bubble, 100 * self.bubble / 9):
            y = self.y(percent / 100)
            self.parts.append(f'<path class="grid" d="M{_LEFT} {_n(y)}H{_RIGHT}"/>')
            self.text(_LEFT - 8, y + 4, f"{number(percent)} %", "faint end")
        for memory in ticks(self.memory, self.memory / 16):
            self.parts.append(f'<path class="grid" d="M{_n(self.x(memory))} {_TOP}V{_FLOOR}"/>')
            self.text(self.x(memory), _FLOOR + 16, number(memory), "faint middle")
        self.text(_LEFT - 8, _TOP - 10, "bubble", "faint end")
        self.text(_RIGHT, _FLOOR + 32, f"activation memory of the worst rank, {unit}", "faint end")

    def bound(self, curve: Sequence[Point]) -> None:
        """Draws a dashed line from limit to limit."""
        inside = [point for point in curve if point.memory <= self.memory and point.bound <= self.bubble]
        bound = [(self.x(point.memory), self.y(point.bound)) for point in inside]
        for (x, _), (right, low) in itertools.pairwise(bound):
            self.taken.append((x, low - 3, right, low + 3))
        if bound:
            self.looks.add("bound")
            self.parts.append('<path class="bound" d="M' + "L".join(f"{_n(x)} {_n(y)}" for x, y in bound) + '"/>')

    def steps(self, look: str, points: Sequence[Shortest]) -> None:
        """Draws a curve as steps, from the point where it enters the area."""
        inside = [
            (self.x(point.memory), self.y(point.lost))
            for point in points
            if point.memory <= self.memory and point.lost <= self.bubble
        ]
        path, level = "", float(_TOP)
        for (x, y), end in zip(inside, [*(x for x, _ in inside[1:]), _RIGHT], strict=False):
            path += f"V{_n(y)}H{_n(end)}"
            self.taken += [(x - 2, level, x + 2, y), (x, y - 3, end, y + 3)]
            level = y
        if inside:
            self.looks.add(look)
            self.parts.append(f'<path class="{look}" d="M{_n(inside[0][0])} {_TOP}{path}"/>')

    def marks(self, marks: Sequence[Mark]) -> None:
        """Draws symbols, then one label for every group of marks at the same point."""
        groups: list[list[Mark]] = []
        for mark in sorted(marks, key=lambda mark: (bool(mark.project), mark.memory, mark.bubble)):
            x, y = self.x(mark.memory), self.y(mark.bubble)
            self.taken.append((x - 5, y - 5, x + 5, y + 5))
            self.looks.add("other" if mark.project else "ours")
            self.parts.append((_OTHER if mark.project else _OURS).format(x=_n(x), y=_n(y)))
            apart = [max(abs(self.x(first.memory) - x), abs(self.y(first.bubble) - y)) for first, *_ in groups]
            if apart and min(apart) < _NEAR:
                groups[apart.index(min(apart))].append(mark)
            else:
                groups.append([mark])
        for group in sorted(groups, key=lambda group: -group[0].memory):  # room to the right fills up first
            self.label(group)

    def label(self, group: Sequence[Mark]) -> None:
        """Draws the names and projects of ``group`` where they cover nothing, or else the least."""
        text = _name(group)
        x, y, wide = self.x(group[0].memory), self.y(group[0].bubble), width(text, _SIZE)
        left, middle = min(_places(x, y, wide), key=lambda place: self.covered(_box(place[0], place[1], wide)))
        self.taken.append(_box(left, middle, wide))
        near = min(max(x, left), left + wide)
        if max(abs(middle - y), abs(near - x)) > 14:
            self.parts.append(f'<path class="lead" d="M{_n(x)} {_n(y)}L{_n(near)} {_n(middle)}"/>')
        self.text(left, middle + 4, markup(text), "theirs" if group[0].project else "ours")

    def covered(self, box: Box) -> float:
        """Area that a label would cover; parts outside the chart count most."""
        left, top, right, bottom = box
        outside = max(0, _LEFT - left) + max(0, right - _WIDTH) + max(0, _TOP - top) + max(0, bottom - _FLOOR)
        return 100 * outside + sum(_overlap(box, other) for other in self.taken)

    def words(self, heading: str, caption: str) -> float:
        """Draws the heading, the legend if it is needed, and the caption. Returns the end of the last line."""
        self.text(18, 28, markup(heading), "head")
        shown = {shape: meaning for shape, meaning in _LEGEND.items() if shape.split('"')[1] in self.looks}
        several = len(shown) > 1
        x, y = float(_LEFT), _FLOOR + (60.0 if several else 34.0)
        for shape, meaning in shown.items() if several else ():
            self.parts.append(shape.format(x=_n(x), y=_n(y - 4)))
            x += 24 if "h18" in shape else 10
            self.text(x, y, meaning, "faint")
            x += width(meaning, _SIZE) + 12
        for line in lines(caption, _SIZE, _RIGHT - _LEFT):
            y += 20
            self.text(_LEFT, y, markup(line), "faint")
        return y + 16

    def text(self, x: float, y: float, content: str, look: str) -> None:
        """Draws a line of text; ``content`` is markup."""
        self.parts.append(f'<text class="{look}" x="{_n(x)}" y="{_n(y)}">{content}</text>')

    def x(self, memory: float) -> float:
        """Horizontal position of an amount of memory."""
        return _LEFT + memory / self.memory * (_RIGHT - _LEFT)

    def y(self, bubble: float) -> float:
        """Vertical position of a bubble."""
        return _FLOOR - bubble / self.bubble * (_FLOOR - _TOP)


def _name(group: Sequence[Mark]) -> str:
    """Returns all schedules of one project, or the shortest name of one schedule in several projects."""
    projects = list(dict.fromkeys(mark.project for mark in group))
    if len(projects) == len(group):
        text = min((mark.name for mark in group), key=len)
    else:
        text = ", ".join(dict.fromkeys(mark.name for mark in group if mark.project == projects[0]))
    return text if projects == [""] else f"{text} ({', '.join(project or 'ours' for project in projects)})"


def _places(x: float, y: float, width: float) -> Iterator[tuple[float, float]]:
    """Yields left ends and middles of a label for the point (x, y), the preferred first."""
    for away in (0, 12, 16, 24, 40, 60, 84, 110):
        for side in (8 + 0.4 * away, -8 - width, -width / 2)[: 3 if away else 2]:
            yield x + side, y - away
            yield x + side, y + away


def _box(left: float, middle: float, width: float) -> Box:
    return left - 2, middle - 6.5, left + width + 2, middle + 6.5


def _overlap(one: Box, other: Box) -> float:
    wide, tall = (min(one[k + 2], other[k + 2]) - max(one[k], other[k]) for k in (0, 1))
    return max(0.0, wide) * max(0.0, tall)


def _style() -> str:
    scheme = (
        ".page{{fill:{}}}.grid{{stroke:{}}}text{{fill:{}}}.faint{{fill:{faint}}}.bound,.lead{{stroke:{faint}}}"
        ".ours{{fill:{ours}}}.curve{{stroke:{ours}}}.other{{stroke:{other}}}.theirs{{fill:{other}}}"
        ".again{{stroke:{again}}}.offload{{stroke:{offload}}}"
    )
    names = ("faint", "ours", "other", "again", "offload")
    light, dark = (scheme.format(*hues[:3], **dict(zip(names, hues[3:], strict=True))) for hues in (_LIGHT, _DARK))
    return (
        ".head{font-size:15px;font-weight:700}.end{text-anchor:end}.middle{text-anchor:middle}path{fill:none}"
        ".curve,.again,.offload{stroke-width:2.2}.bound{stroke-width:1.3;stroke-dasharray:5 4}.other{stroke-width:1.5}"
        f".lead{{stroke-width:.6}}{light}@media (prefers-color-scheme:dark){{{dark}}}"
    )


def _n(value: float) -> str:
    """Formats a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def draw_comparison(rows: Sequence[Row], caption: str) -> str:
    """Draws ``rows`` as points with labels. The caption lists those without a plan.

    Raises:
        PlanError: if none of them has a plan.
    """
    plans = {row.name: row.result for row in rows if isinstance(row.result, Figures)}
    without = {row.name: row.result for row in rows if isinstance(row.result, str)}
    if not plans:
        raise PlanError(f"no schedule can be drawn: {next(iter(without.values()), 'none was asked for')}")
    marks = [Mark(title(name), "", plan.peak, 1 - plan.useful) for name, plan in plans.items()]
    most = max(mark.memory for mark in marks), max(mark.bubble for mark in marks)
    said = [caption]
    if any(plan.recomputed for plan in plans.values()):
        said.append("Recompute counts as bubble.")
    if without:
        said.append(f"Without a plan: {', '.join(map(title, without))}.")
    memory, bubble = (_BEYOND * value or 1.0 for value in most)
    one = max(plan.microbatch_bytes for plan in plans.values())
    unit = f"microbatches of {amount(one)}" if one else "microbatches"
    return draw_frontier((), marks, "Bubble against activation memory", " ".join(said), (memory, bubble), unit=unit)
