"""What the parts of the benchmark share: rows of figures, how they are summed up, and where they are kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.utils.output_files import write_text

Row = Mapping[str, Any]
Say = Callable[[str], None]


class Part(NamedTuple):
    """One part of the benchmark.

    Args:
        name: its subcommand.
        title: its heading on the page.
        measure: all its rows, a sample where its first argument is true; the second is told what goes on.
        section: its rows as Markdown, without the heading.
        drawing: its rows as an SVG, which the section shows as ``images/NAME.svg``.
    """

    name: str
    title: str
    measure: Callable[[bool, Say], Iterator[Row]]
    section: Callable[[Sequence[Row]], str]
    drawing: Callable[[Sequence[Row]], str] | None = None


class Spread(NamedTuple):
    """Several timings of one thing.

    Args:
        median: the middle one.
        low, high: the shortest and the longest.
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))

    def per(self, other: Spread) -> float:
        """The ratio of the medians."""
        return self.median / other.median


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def machine() -> str:
    """The processor's name and how many of its cores there are."""
    name = platform.processor() or "a CPU of unknown name"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


class Kept:
    """The rows of every part, with the day, the machine and the command of each, in a JSON file beside the page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "benchmarks.json"
        self.parts: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def keep(self, part: Part, rows: Sequence[Row], command: str) -> None:
        """Put ``rows`` in the place of what was measured before."""
        today = datetime.date.today().isoformat()
        self.parts[part.name] = {"date": today, "machine": machine(), "command": command, "rows": [*rows]}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.parts, indent=1) + "\n")
        if part.drawing is not None:
            images = self.folder / "images"
            images.mkdir(exist_ok=True)
            write_text(images / f"{part.name}.svg", part.drawing(rows))

    def page(self, parts: Sequence[Part]) -> str:
        """All that was measured, as Markdown."""
        text = [
            "# Benchmarks",
            "Made by `bash scripts/benchmark.sh`, every figure beside its baseline from the same run; the rows are in "
            "[benchmarks.json](benchmarks.json). How good the planner is by itself: "
            "[benchmarks-planning.md](benchmarks-planning.md).",
        ]
        for part in parts:
            if found := self.parts.get(part.name):
                text += [f"## {part.title}", f"{found['date']}, {found['machine']}; `{found['command']}`"]
                text.append(part.section(found["rows"]).strip())
        return "\n\n".join(text) + "\n"
