"""Shared by the parts of the benchmark: rows of figures, their summary, and the file that stores them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.utils.output_files import write_text

_INTRODUCTION = """\
What this package claims, whether it held when it was measured, and the tables that show it. Every figure is compared
with a baseline of the same run. Nothing here ran on a GPU. [benchmarks.json](benchmarks.json) has all measurements,
more than are shown here. `bash scripts/benchmark.sh NAME` measures one part again, without NAME all; with `page` it
only writes this page from the recorded data. The planner alone: [benchmarks-planning.md](benchmarks-planning.md). `d`
is the number of pipeline ranks, `n` of microbatches; other words are in the [glossary](glossary.md)."""

Row = Mapping[str, Any]
Say = Callable[[str], None]


class Claim(NamedTuple):
    """One claim and its verdict from the measurements.

    Args:
        text: what should hold.
        found: the figures that decide it.
        verdict: ``held``, ``not held``, or in between.
    """

    text: str
    found: str
    verdict: str


class Part(NamedTuple):
    """One part of the benchmark.

    Args:
        name: its subcommand.
        title: its heading on the page.
        measure: all its rows, a sample where its first argument is true; the second is told what goes on.
        claims: what its rows should show.
        section: how it was measured and its tables, as Markdown without the heading.
        drawing: its rows as an SVG, which the section shows as ``images/NAME.svg``.
    """

    name: str
    title: str
    measure: Callable[[bool, Say], Iterator[Row]]
    claims: Callable[[Sequence[Row]], list[Claim]]
    section: Callable[[Sequence[Row]], str]
    drawing: Callable[[Sequence[Row]], str] | None = None


class Statistics(NamedTuple):
    """Median and range of several measurements of one thing.

    Args:
        median: the middle one.
        low, high: the shortest and the longest, or the quartiles.
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Statistics:
        """Returns the statistics of at least one value."""
        return Statistics(statistics.median(values), min(values), max(values))

    @staticmethod
    def quartiles(values: Sequence[float]) -> Statistics:
        """Returns the median and the quartiles of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Statistics(median, low, high)

    def per(self, other: Statistics) -> float:
        """Returns the ratio of the medians."""
        return self.median / other.median


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def verdict(held: bool) -> str:
    """Returns the verdict in words."""
    return "held" if held else "not held"


def span(values: Sequence[float], form: str) -> str:
    """Returns the range from the least to the most."""
    return f"{min(values):{form}}-{max(values):{form}}" if values else ""


def claims_table(parts: Sequence[tuple[Part, Sequence[Row]]]) -> str:
    """Returns a line for each claim of each part, with a link to the part's section."""
    lines = ["| claim | measured | verdict | details |", "| --- | --- | --- | --- |"]
    for part, rows in parts:
        link = f"[{part.name}](#{re.sub(r'[^a-z0-9 -]', '', part.title.lower()).replace(' ', '-')})"
        for claim in part.claims(rows):
            said = claim.verdict if claim.verdict == "held" else f"**{claim.verdict}**"
            lines.append(f"| {claim.text} | {claim.found} | {said} | {link} |")
    return "\n".join(lines)


def machine() -> str:
    """Returns the processor's name and number of cores."""
    name = platform.processor() or "a CPU of unknown name"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


class Kept:
    """The rows of every part, with its date, machine and command, in a JSON file next to the page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "benchmarks.json"
        self.parts: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def keep(self, part: Part, rows: Sequence[Row], command: str) -> None:
        """Replaces the rows of a part."""
        today = datetime.date.today().isoformat()
        self.parts[part.name] = {"date": today, "machine": machine(), "command": command, "rows": [*rows]}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.parts, indent=1) + "\n")
        if part.drawing is not None:
            images = self.folder / "images"
            images.mkdir(exist_ok=True)
            write_text(images / f"{part.name}.svg", part.drawing(rows))

    def page(self, parts: Sequence[Part]) -> str:
        """Returns the claims and their tables, as Markdown."""
        found = [(part, self.parts[part.name]) for part in parts if part.name in self.parts]
        measured: dict[str, list[str]] = {}
        for part, kept in found:
            measured.setdefault(f"{kept['date']}, {kept['machine']}", []).append(part.name)
        runs = [f"Measured on {where}: {', '.join(names)}." for where, names in measured.items()]
        text = ["# Benchmarks", _INTRODUCTION, *runs, "## Claims"]
        text.append(claims_table([(part, kept["rows"]) for part, kept in found]))
        for part, kept in found:
            text += [f"## {part.title}", f"`{kept['command']}`"]
            text.append(part.section(kept["rows"]).strip())
        return "\n\n".join(text) + "\n"
