"""Timelines as one self-contained HTML page: zoom, hover, memory, and the causes of idle time."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.report import palette
from megatron.schedules.report.figures import figures, microbatches
from megatron.schedules.report.idle import Cause, Idle, Phase, gaps, idle
from megatron.schedules.report.packed import TICKS, Packer, packed
from megatron.schedules.report.palette import markup
from megatron.schedules.report.views import View, extent
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import amount, percent

_ASSETS = files("megatron.schedules.report") / "page"
_SCRIPTS = ("data.js", "paint.js", "words.js", "chart.js", "start.js")
_MANY = 64  # most ranks of a table that is not folded
_BAR = 120  # length of the longest bar, pixels
_MOST_RANKS = 3  # most ranks that a row names
_CLASSES = {Phase.WARM_UP: "warm", Phase.STEADY: "steady", Phase.COOL_DOWN: "cool"}


def timeline_page(shown: Sequence[View], heading: str, caption: str = "", unit: str = "") -> str:
    """Draws ``shown`` one below another on one time axis.

    Args:
        shown: at least one; all in one unit of time.
        heading: plain text, the page's title.
        caption: plain text, a sentence or two under it.
        unit: unit of time; empty if unknown.
    """
    style, script = _asset("timeline.css"), "\n".join(['"use strict";', *map(_asset, _SCRIPTS)])
    every_gap = [gaps(view.timeline) for view in shown]
    until, packer = extent(shown), Packer()
    contents = {
        "unit": unit,
        "until": until,
        "ticks": TICKS,
        "kinds": [{"letter": kind.value, "meaning": row.meaning} for kind, row in KINDS.items()],
        "views": [
            packed(view, until, rows, packer) | _look(view, unit) for view, rows in zip(shown, every_gap, strict=True)
        ],
    }
    tables = "".join(
        _foldable(f"Idle time of each rank, {view.label}", idle_table(view.timeline, idle(view.timeline, rows)), view)
        for view, rows in zip(shown, every_gap, strict=True)
    )
    group = '<button id="group" title="g">by rank</button>' if len(shown) > 1 else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {_hash(style)}; \
script-src {_hash(script)}">
<meta name="viewport" content="width=device-width">
<title>{markup(heading)}</title>
<style>{style}</style>
</head>
<body>
<h1>{markup(heading)}</h1>
<p>{markup(caption)}</p>
<dl id="cards">{_cards(shown, unit)}</dl>
<div id="tools">
<div class="legend">{_legend(shown)}</div>
<div>
<button id="nearer" title="+ or w">zoom in</button>
<button id="farther" title="- or s">zoom out</button>
<button id="fit" title="0">all</button>
{group}
<button id="hatch" title="h">hatching</button>
</div>
</div>
<p id="failed" hidden></p>
<div id="chart" tabindex="0">
<div id="tall"><div id="pane"><canvas id="rows" role="img" aria-label="The timeline; the tables below tell where \
each rank idles"></canvas><canvas id="over"></canvas></div></div>
</div>
<div id="tip" role="status" hidden></div>
<p class="keys">Zoom: wheel, double click, <kbd>+</kbd> <kbd>-</kbd>; a part: drag along the axis, or with shift; \
move: drag, <kbd>←</kbd> <kbd>→</kbd>; everything: <kbd>0</kbd>. Over the ranks' names the wheel scrolls. Point at a \
pass to see what it waited for. Where single passes are too narrow, columns show how busy the rank is, and with what. \
Under each rank is its activation memory; dashed lines end its warm-up and begin its cool-down.</p>
{tables}
<script id="contents" type="application/json">{_in_script(contents)}</script>
<script id="arrays" type="text/plain">{packer.text()}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the hash of an inline style or script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_script(contents: Any) -> str:
    """Returns JSON in which no name can end the script."""
    return json.dumps(contents, separators=(",", ":")).replace("<", "\\u003c")


def _look(view: View, unit: str) -> dict[str, Any]:
    """Returns colours by kind and chunk, each with its text colour, and the text of the heading."""
    chunks = view.timeline.schedule.placement.chunks
    fills = {index: [palette.fill(kind, chunk, chunks) for chunk in range(chunks)] for index, kind in enumerate(KINDS)}
    said = f"bubble {percent(view.timeline.bubble)}, {_time(view.timeline.makespan, unit)}"
    return {
        "said": said,
        "fills": {
            index: [[palette.hexadecimal(fill), palette.hexadecimal(palette.ink(fill))] for fill in shades]
            for index, shades in fills.items()
        },
    }


def _time(time: float, unit: str) -> str:
    return f"{time:.4g} {unit}".rstrip() if time < 1e4 else f"{time:.0f} {unit}".rstrip()


def _cards(shown: Sequence[View], unit: str) -> str:
    """Returns the headline figures.

    They are each view's bubble and iteration time, and the last view's slowest stage and peak memory.
    """
    cards = []
    for view in shown:
        plan = figures(view.timeline)
        cards.append((f"Bubble, {view.label}", percent(plan.bubble), f"of {_time(plan.makespan, unit)}"))
    last = shown[-1]
    schedule, summed = last.timeline.schedule, iteration_of(last.timeline)
    slow = summed.slowest
    time = summed.stages[slow.stage] / schedule.microbatches
    cards.append(
        (
            f"Slowest stage, {last.label}",
            f"stage {slow.stage}",
            f"on rank {schedule.placement.rank_of[slow.stage]}: {_time(time, unit)} a microbatch, "
            + (f"{percent(slow.beyond_mean, 0)} over the average" if slow.beyond_mean >= 0.005 else "as all others"),
        )
    )
    peaks = [max((held for _, held in last.memory(r)), default=0.0) for r in range(schedule.ranks)]
    most = max(peaks)
    held = amount(most) if last.held else microbatches(most, last.microbatch_bytes)
    cards.append((f"Most activations, {last.label}", held, f"on rank {peaks.index(most)}"))
    return "".join(
        f"<div><dt>{markup(name)}</dt><dd>{markup(value)} <small>{markup(more)}</small></dd></div>"
        for name, value, more in cards
    )


def _legend(shown: Sequence[View]) -> str:
    """Returns a swatch for each kind in the views; the script paints it."""
    there: set[Kind] = {kind for view in shown for kind in view.timeline.schedule.kinds}
    swatches = "".join(
        f'<span><canvas class="swatch" data-kind="{kind}"></canvas>{kind} {markup(row.meaning)}</span>'
        for kind, row in KINDS.items()
        if kind in there
    )
    chunks = max(view.timeline.schedule.placement.chunks for view in shown)
    return swatches + "<span>lighter: later chunk</span>" * (chunks > 1)


def _foldable(heading: str, table: str, view: View) -> str:
    """Returns a table under its heading, folded if it is long."""
    if view.timeline.schedule.ranks <= _MANY:
        return f'<h2>{markup(heading)}</h2><div class="wide">{table}</div>'
    return f'<details><summary>{markup(heading)}</summary><div class="wide">{table}</div></details>'


def idle_table(timeline: Timeline, ranks: Sequence[Idle]) -> str:
    """Returns an HTML table with a row for each rank. Its last row is the mean, whose idle share is the bubble."""
    whole, most = timeline.makespan, max(max(row.total for row in ranks), 1e-300)
    causes = [cause for cause in Cause if any(row.of(cause) > 1e-9 * whole for row in ranks)]
    heads = ["rank", "idle", *Phase, *causes]
    head = "".join(f"<th>{_key(name)}{name}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{row.rank}</td>{_cells(_amounts(row, causes), whole)}<td>{_bar(row, most)}</td>"
        f'<td class="words">{_whom(row, whole)}</td></tr>'
        for row in ranks
    )
    mean = [sum(column) / len(ranks) for column in zip(*(_amounts(row, causes) for row in ranks), strict=True)]
    return (
        f'<table><thead><tr>{head}<th class="words">by phase</th><th class="words">waits longest for</th></tr></thead>'
        f"<tbody>{body}</tbody><tfoot><tr><td>mean</td>{_cells(mean, whole)}<td></td><td></td></tr></tfoot></table>"
    )


def _key(name: str) -> str:
    """Returns the colour of a phase in the bars."""
    if name not in _CLASSES:
        return ""
    return f'<svg class="bar" width="14" height="9"><rect class="{_CLASSES[Phase(name)]}" width="9" height="9"/></svg>'


def _amounts(row: Idle, causes: Sequence[Cause]) -> list[float]:
    return [row.total, *row.phases.values(), *(row.of(cause) for cause in causes)]


def _cells(amounts: Sequence[float], whole: float) -> str:
    return "".join(f"<td>{percent(amount / whole + 0.0, 2)}</td>" for amount in amounts)


def _bar(row: Idle, most: float) -> str:
    """Returns a bar with the phases side by side."""
    left, parts = 0.0, []
    for phase, time in row.phases.items():
        wide = max(0.0, time / most * _BAR)
        parts.append(f'<rect class="{_CLASSES[phase]}" x="{left:.1f}" width="{wide:.1f}" height="10"/>')
        left += wide
    return f'<svg class="bar" width="{_BAR}" height="10" aria-hidden="true">{"".join(parts)}</svg>'


def _whom(row: Idle, whole: float) -> str:
    named = [f"rank {rank} ({percent(time / whole, 1)})" for rank, time in row.for_ranks[:_MOST_RANKS]]
    return ", ".join(named) or "nobody"
