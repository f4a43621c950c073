#!/usr/bin/env python3
"""Measures the quality of adaptive schedules and the planning time; writes a page of figures and a drawing.

Results are cached by cell and by the planner's code: an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import planning_table as table
from benchmarks.planning_cells import Cell, Result, code_version, measure
from megatron.schedules.planner.adaptive import default_seconds
from megatron.schedules.report.figures import title
from megatron.schedules.report.frontier_svg import Mark, Point, Shortest, draw_frontier
from megatron.schedules.utils.child_processes import worker_pool
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.output_files import write_text

_PEERS = Path(__file__).with_name("peers.json")
_DRAWN = (8, 32, "C")  # size and costs of the frontier that is shown
# Memory limits with recompute and offload, of 1F1B's memory: those of the frontier without, one each half microbatch; a
# quick run takes every fourth one. A copy one way takes so much of the computing of the same layers.
_LIMITS, _COPIES = tuple(step / (2 * _DRAWN[0]) for step in range(2, 2 * _DRAWN[0] + 1)), (0.25, 0.5)
_LONGER = 30.0  # seconds of search on the frontier that is drawn, beside the default
_TIMED = ((8, 32, 10.0), (16, 64, 30.0), (32, 128, 60.0), (64, 512, 180.0))


class Cells(NamedTuple):
    """All measurements, by section of the report."""

    peers: dict[tuple[int, int, str], Cell]
    optima: dict[str, Cell]
    curve: dict[float, Cell]
    saved: dict[str, list[Cell]]
    lots: list[Cell]
    times: list[tuple[Cell, float]]

    def untimed(self) -> list[Cell]:
        """Returns the cells that are not timed, the longest first."""
        saved = [cell for cells in self.saved.values() for cell in cells]
        found = dict.fromkeys([*self.peers.values(), *self.optima.values(), *self.curve.values(), *saved, *self.lots])
        return sorted(found, key=lambda cell: -cell.ranks * cell.microbatches * (cell.seconds or 1))


def cells_of(peers: table.Json, quick: bool) -> Cells:
    """Returns what to measure, or with ``quick`` a sample of it."""
    costs = {name: table.costs_text(numbers) for name, numbers in peers["costs"].items()}
    sizes: dict[tuple[int, int, str], float] = {}
    for row in peers["rows"]:
        size = row["d"], row["n"], row["costs"]
        if not quick or row["d"] <= 8 or size == (16, 64, "C"):
            sizes[size] = max(row["peak"], sizes.get(size, 0.0))
    compared = {(d, n, name): Cell("frontier", d, n, costs[name], float(most)) for (d, n, name), most in sizes.items()}
    d, n, name = _DRAWN
    curve = {default_seconds(d, n): compared[_DRAWN]}
    if not quick:
        curve[_LONGER] = Cell("frontier", d, n, costs[name], sizes[_DRAWN], _LONGER)
    timed = [
        (Cell("time", d, n, costs["C"], limit), target if limit == 1.0 else 0.0)
        for limit in (1.0, 0.5)
        for d, n, target in (_TIMED[:2] if quick else _TIMED)
    ]
    return Cells(
        peers=compared,
        optima={text: Cell("frontier", 4, 8, text, 4.0) for text in table.OPTIMA},
        curve=curve,
        saved={
            heading: [
                Cell("memory_saving", d, n, costs[name], limit, recompute=recompute, copy=copy)
                for limit in _LIMITS[:: 4 if quick else 1]
            ]
            for heading, recompute, copy in _savings(peers["costs"][name], quick)
        },
        lots=[Cell("random", seed=seed) for seed in range(12 if quick else 60)],
        times=timed,
    )


def _savings(costs: Sequence[float], quick: bool) -> list[tuple[str, bool, float]]:
    """Returns what is allowed: a heading, whether to recompute, and how long half a rank's activations are copied."""
    copies = {part: part * sum(costs[:3]) for part in (_COPIES[-1:] if quick else _COPIES)}
    offloads = [(_offload(part), False, time) for part, time in copies.items()]
    return [("recompute", True, 0.0), *offloads, (f"both, {_COPIES[-1]:g}", True, copies[_COPIES[-1]])]


def _offload(part: float) -> str:
    return f"offload, {part:g}"


class Kept:
    """Cached results in a file of JSON lines, each with its cell and the version of the code."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, code_version()
        self.results: dict[str, Result] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):
            write_text(path, text + "\n")
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):  # a line that was cut short
                entry = json.loads(line)
                if entry["version"] == self.version:
                    self.results[entry["cell"]] = entry["result"]

    def find(self, cell: Cell) -> Result | None:
        """Returns the result for ``cell``."""
        return self.results.get(str(cell))

    def keep(self, cell: Cell, result: Result) -> None:
        """Writes ``result`` at once."""
        self.results[str(cell)] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"version": self.version, "cell": str(cell), "result": result}) + "\n")


def run(cells: Sequence[Cell], kept: Kept, jobs: int, what: str) -> None:
    """Measures what is missing, in ``jobs`` processes."""
    missing = [cell for cell in cells if kept.find(cell) is None]
    console = Console(stderr=True, highlight=False)
    if len(missing) < len(cells):
        console.print(f"{what}: {len(cells) - len(missing)} of {len(cells)} are there already")
    if not missing:
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Fresh processes: none of them starts with the memory of another's search.
    with worker_pool(jobs) as pool, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=len(missing))
        futures = {pool.submit(measure, cell): cell for cell in missing}
        for future in as_completed(futures):
            cell, result = futures[future], future.result()
            kept.keep(cell, result)
            console.print(f"{cell}: {result['seconds']:.1f} s", soft_wrap=True)
            progress.advance(task)


def report(cells: Cells, kept: Kept, peers: table.Peers, command: str) -> str:
    """Returns the page."""
    lots = [found for cell in cells.lots if (found := kept.find(cell))]
    curve = {seconds: found for seconds, cell in cells.curve.items() if (found := kept.find(cell))}
    d, n, name = _DRAWN
    drawn_costs = table.costs_text(peers.data["costs"][name])
    return f"""\
# Benchmarks of the planner

How short the plans of `adaptive` are within a memory limit, compared with other projects' schedules, proved optima and
our schedules by name; and how long planning takes. [How it works](adaptive.md).

- {datetime.date.today()}, {_machine()}; `{command}`
- Search budget: the default, from {default_seconds(8, 32):.0f} nominal seconds for 8 ranks and 32 microbatches to {
        default_seconds(64, 512):.0f} for 64 and 512, if nothing
  else is said. It is counted in scheduled passes, so the bubbles are equal on every machine. The times are not.
- bubble = 1 - computing / makespan. Memory is the worst rank's activation memory in microbatches; 1F1B holds d. d
  ranks, n microbatches. Costs are F,I,W,LATENCY over half a rank's layers.

## Other projects' schedules

{_sources(peers.data)}

Each schedule, size and costs is a row. A row is met if our bubble and our peak memory are not larger (to the four
digits that are known of theirs). One simulator times all of them.

{peers.section()}
## Where memory is scarce

Memory up to {table.LOW_MEMORY:g} d, costs C and D. For each amount of memory that one of them needs, ours is compared
with the best of all within it.

{peers.low_memory()}
## Optimal makespans

d = 4, n = 8, compared with a constraint solver for a V with two chunks. Ours may use four, and can then be shorter.

{table.optima(cells.optima, kept.find)}
## The frontier

d = {d}, n = {n}, costs `{drawn_costs}`, by seconds of search. "No less than" is a lower bound on the bubble of any
schedule.

![Bubble against activation memory](images/frontier.svg)

{table.curve(curve, float(d)) if curve else "Nothing was measured."}
## With recompute and offload

The same size and costs, with recompute or with copies of activations to host memory. "0.5" says that a copy one way
takes half as long as all computing of the same layers. The figures are the share of the iteration time that is not
useful computing: idle time and recompute (without recompute this is the bubble). In brackets: the share of the layers
that is recomputed or offloaded. "Without" is of the longest search above, the others of one of 8 s
(`MEGATRON_SCHEDULES_SEARCH_SECONDS=8`), which chooses shares with more effort than the default.

{table.saved(cells.saved, curve, kept.find)}
## Random sizes and costs

d from 2 to 24, n from 1 to 3d, costs in ratios up to 3, unequal stages (half of them also of unequal memory), and any
memory limit up to 1.25.

{table.lots(lots)}
## Planning time

On one core, including the schedules by name that the search starts from; costs `{drawn_costs}`.

{table.times(cells.times, kept.find)}"""


def drawing(found: Result, saved: dict[str, list[Shortest]], peers: table.Peers) -> str:
    """Draws the frontier with the schedules of all projects."""
    d, n, name = _DRAWN
    points = [Point(rung["limit"], rung["bubble"], max(0.0, rung["bubble_bound"])) for rung in found["rungs"]]
    ours = [Mark(title(each["name"]), "", each["peak"], each["bubble"]) for each in found["named"]]
    most = (12.0, 0.36)
    marks = [*ours, *peers.marks(d, n, name)]
    beyond = sorted({mark.name for mark in marks if mark.memory > most[0] or mark.bubble > most[1]})
    costs = table.costs_text(peers.data["costs"][name])
    heading = f"Bubble against activation memory: {d} ranks, {n} microbatches, costs {costs}"
    caption = f"1F1B holds {d}. Beyond the edges: {', '.join(beyond)}"
    if saved:
        caption += (
            f". Recompute counts as bubble; a copy one way takes {_COPIES[-1]:g} of the computing. "
            "Each curve shows the best plan found for a limit or a smaller one; with recompute or offload, plans "
            "without count too."
        )
    return draw_frontier(points, marks, heading, caption, most, saved)


def _curves(saved: dict[str, list[Cell]], kept: Kept) -> dict[str, list[Shortest]]:
    """Returns the drawing's curves: recompute, and offload with the slowest copies."""
    looks = {"again": "recompute", "offload": _offload(_COPIES[-1])}
    return {
        look: [
            Shortest(cell.up_to * cell.ranks, 1 - found["useful"])
            for cell in saved[heading]
            if (found := kept.find(cell))
        ]
        for look, heading in looks.items()
    }


def _sources(data: table.Json) -> str:
    return "\n".join(f"- {name}: {source}" for name, source in data["sources"].items())


def _machine() -> str:
    name = "a CPU of unknown name"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_planning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a sample that takes minutes")
    parser.add_argument("--drawing", action="store_true", help="only the frontier's drawing, and what it shows")
    parser.add_argument("--jobs", type=int, default=2, help="processes to measure in (2); times are taken in one")
    parser.add_argument(
        "--results", type=Path, default=Path(".benchmark/planning.jsonl"), help="where results are kept"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the page to write; without it docs/benchmarks-planning.md, or for a sample "
        ".benchmark/planning-quick.md. The drawing goes to images/frontier.svg beside it",
    )
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs must be 1 or more, not {arguments.jobs}")
    output = arguments.output or Path(
        ".benchmark/planning-quick.md" if arguments.quick else "docs/benchmarks-planning.md"
    )
    data = json.loads(_PEERS.read_text())
    cells, kept = cells_of(data, arguments.quick), Kept(arguments.results)
    try:
        if arguments.drawing:
            saved = [cell for of_heading in cells.saved.values() for cell in of_heading]
            run([*cells.curve.values(), *saved], kept, arguments.jobs, "plans")
        else:
            run(cells.untimed(), kept, arguments.jobs, "plans")
            run([cell for cell, _ in cells.times], kept, 1, "planning times")
    except KeyboardInterrupt:
        print(f"stopped; what was measured is kept in {arguments.results}", file=sys.stderr)
        return 130
    peers = table.Peers(data, cells.peers, kept.find)
    command = " ".join(["bash scripts/benchmark_planning.sh", *(sys.argv[1:] if argv is None else argv)])
    image = output.parent / "images" / "frontier.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    drawn = kept.find(cells.curve[max(cells.curve)])
    assert drawn is not None
    try:
        if not arguments.drawing:
            write_text(output, report(cells, kept, peers, command))
        write_text(image, drawing(drawn, _curves(cells.saved, kept), peers))
    except OSError as error:
        parser.error(one_line(f"cannot write {error.filename}: {error.strerror}"))
    print(f"{image} is written" if arguments.drawing else f"{output} and {image} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
