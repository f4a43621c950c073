"""Timelines as one HTML page that needs nothing else: zoom, hover, memory, and where the idle time lies."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from megatron.schedules.report import palette
from megatron.schedules.report.figures import amount, figures, microbatches
from megatron.schedules.report.idle import gaps, idle
from megatron.schedules.report.idle_table import idle_table
from megatron.schedules.report.markup import markup
from megatron.schedules.report.packed import TICKS, Packer, packed
from megatron.schedules.report.views import View, extent, slowest_stage
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.utils.printable import percent

_ASSETS = files("megatron.schedules.report") / "page"
_SCRIPTS = ("data.js", "paint.js", "words.js", "chart.js", "start.js")
_MANY = 64  # ranks of a table that is shown unasked


def timeline_page(shown: Sequence[View], heading: str, caption: str = "", unit: str = "") -> str:
    """Draw ``shown`` below one another on one time axis.

    Args:
        shown: at least one; all in one unit of time.
        heading: plain text, the page's title.
        caption: plain text, a sentence or two under it.
        unit: of time; empty where it is any.
    """
    style, script = _asset("timeline.css"), "\n".join(['"use strict";', *map(_asset, _SCRIPTS)])
    found = [gaps(view.timeline) for view in shown]
    until, packer = extent(shown), Packer()
    contents = {
        "unit": unit,
        "until": until,
        "ticks": TICKS,
        "kinds": [{"letter": kind.value, "meaning": row.meaning} for kind, row in KINDS.items()],
        "views": [
            packed(view, until, each, packer) | _look(view, unit) for view, each in zip(shown, found, strict=True)
        ],
    }
    tables = "".join(
        _foldable(f"Idle time of each rank, {view.label}", idle_table(view.timeline, idle(view.timeline, each)), view)
        for view, each in zip(shown, found, strict=True)
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
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_script(contents: Any) -> str:
    """JSON that no name in it can end the script with."""
    return json.dumps(contents, separators=(",", ":")).replace("<", "\\u003c")


def _look(view: View, unit: str) -> dict[str, Any]:
    """Colours by kind and chunk, each with that of words on it, and what the heading says."""
    chunks = view.timeline.schedule.placement.chunks
    fills = {index: [palette.fill(kind, chunk, chunks) for chunk in range(chunks)] for index, kind in enumerate(KINDS)}
    said = f"bubble {percent(view.timeline.bubble)}, {_time(view.timeline.makespan, unit)}"
    return {
        "said": said,
        "fills": {
            index: [[palette.hexadecimal(fill), palette.hexadecimal(palette.ink(fill))] for fill in each]
            for index, each in fills.items()
        },
    }


def _time(time: float, unit: str) -> str:
    return f"{time:.4g} {unit}".rstrip() if time < 1e4 else f"{time:.0f} {unit}".rstrip()


def _cards(shown: Sequence[View], unit: str) -> str:
    """Headline figures: each view's bubble and length; of the last, the slowest stage and most memory."""
    cards = []
    for view in shown:
        found = figures(view.timeline)
        cards.append((f"Bubble, {view.label}", percent(found.bubble), f"of {_time(found.makespan, unit)}"))
    last = shown[-1]
    slow = slowest_stage(last.timeline)
    cards.append(
        (
            f"Slowest stage, {last.label}",
            f"stage {slow.stage}",
            f"on rank {slow.rank}: {_time(slow.time, unit)} a microbatch, {percent(slow.beyond_mean, 0)} over "
            "the average",
        )
    )
    peaks = [max((held for _, held in last.memory(r)), default=0.0) for r in range(last.timeline.schedule.ranks)]
    most = max(peaks)
    held = amount(most) if last.held else microbatches(most, last.microbatch_bytes)
    cards.append((f"Most activations, {last.label}", held, f"on rank {peaks.index(most)}"))
    return "".join(
        f"<div><dt>{markup(name)}</dt><dd>{markup(value)} <small>{markup(more)}</small></dd></div>"
        for name, value, more in cards
    )


def _legend(shown: Sequence[View]) -> str:
    """A swatch for each kind that there is; the script paints it."""
    there: set[Kind] = {kind for view in shown for kind in view.timeline.schedule.kinds}
    swatches = "".join(
        f'<span><canvas class="swatch" data-kind="{kind}"></canvas>{kind} {markup(row.meaning)}</span>'
        for kind, row in KINDS.items()
        if kind in there
    )
    chunks = max(view.timeline.schedule.placement.chunks for view in shown)
    return swatches + "<span>lighter: later chunk</span>" * (chunks > 1)


def _foldable(heading: str, table: str, view: View) -> str:
    """A table under its heading, folded where it is long."""
    if view.timeline.schedule.ranks <= _MANY:
        return f'<h2>{markup(heading)}</h2><div class="wide">{table}</div>'
    return f'<details><summary>{markup(heading)}</summary><div class="wide">{table}</div></details>'
