#!/usr/bin/env python3
"""Shows predicted and measured results of a sweep over SLURM, as a table.

    python -m tools.collect_sweep runs/sweep-98.5B-20260102-030405
    python -m tools.collect_sweep runs/sweep-98.5B-20260102-030405 --format markdown --output table.md

A sweep's folder holds candidates.csv, as tools/grid_search.py writes it, and for each of its rows, numbered from 0, a
folder with the logs of the ranks. Rows without logs, and such as failed, say so.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron.schedules.cli.ending import emit
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.printable import printable
from scripts.compare_logs import read_iteration
from tools._parsing import Parser

_MEMORY = re.compile(r"memory \(MB\) .*max allocated: +([\d.]+)")
_NO_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_ERROR = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception)|\S+: error): .*")
_TIME_LIMIT = re.compile(r"CANCELLED AT .* DUE TO TIME LIMIT")
_WARM_UP = 2  # iterations that also allocate, compile and connect


class Candidate(NamedTuple):
    """A row of candidates.csv; None where a cell is empty."""

    number: int
    method: str
    sizes: str
    seconds: float | None
    memory_gib: float | None
    mfu: float | None
    flags: tuple[str, ...]


class Outcome(NamedTuple):
    """The results in a candidate's logs, None where missing. ``seconds``: the median iteration after the first two."""

    status: str
    seconds: float | None = None
    memory_gib: float | None = None


def read_candidates(path: Path) -> list[Candidate]:
    """Reads the rows of candidates.csv.

    Raises:
        ValueError: where it has no row, or lacks a column that is needed.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if missing := {"method", "flags"} - set(rows.fieldnames or ()):
            raise ValueError(f"{path}: lacks the column {min(missing)}")
        found = [_candidate(number, row, path) for number, row in enumerate(rows)]
    if not found:
        raise ValueError(f"{path}: holds no candidate")
    return found


def _candidate(number: int, row: dict[str, str], path: Path) -> Candidate:
    def value(name: str) -> float | None:
        try:
            return float(row[name]) if row.get(name) else None
        except ValueError:
            raise ValueError(f"{path}: row {number}: {name} is {row[name]!r}, no number") from None

    sizes = " x ".join(printable(row.get(name) or "-") for name in ("data", "tensor", "pipeline", "micro_batch_size"))
    return Candidate(
        number,
        printable(row["method"]),
        sizes,
        value("iteration_seconds"),
        value("memory_gib"),
        value("mfu"),
        tuple(shlex.split(row["flags"])),
    )


def read_outcome(folder: Path, job_output: Path) -> Outcome:
    """Reads the outcome of a candidate.

    Args:
        folder: with the ranks' logs, at any depth.
        job_output: what SLURM has kept of the job, which need not be there.
    """
    job = job_output.read_text(encoding="utf-8", errors="replace") if job_output.is_file() else ""
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.rglob("std*.log"))]
    if not logs and not job:
        return Outcome("not run")
    lines = [line for log in logs for line in log.splitlines()]
    iterations = [found for line in lines if (found := read_iteration(line))]
    peaks = [float(peak) / 1024 for line in lines for peak in _MEMORY.findall(line)]
    times = [iteration.elapsed / 1000 for iteration in iterations]
    seconds = statistics.median(times[_WARM_UP:] or times) if times else None
    return Outcome(_status(iterations and iterations[-1].number == iterations[-1].of, logs, job), seconds, _peak(peaks))


def _peak(peaks: Sequence[float]) -> float | None:
    return max(peaks, default=0.0) or None  # without a GPU Megatron counts 0


def _status(finished: object, logs: Iterable[str], job: str) -> str:
    texts = [*logs, job]
    if finished:
        return "done"
    if any(_NO_MEMORY.search(text) for text in texts):
        return "out of memory"
    if _TIME_LIMIT.search(job):
        return "out of time"
    error = next((found[0] for text in texts if (found := _ERROR.search(text))), None)
    return "failed" if error is None else f"failed: {printable(error[:120])}"


class _Column(NamedTuple):
    """A column of the table: its title, its name in CSV, and a candidate's value in it."""

    title: str
    name: str
    value: Callable[[Candidate, Outcome], float | str | None]
    form: str = "{}"


def _measured_mfu(candidate: Candidate, outcome: Outcome) -> float | None:
    """Returns the MFU of the measured time."""
    if not (candidate.mfu and candidate.seconds and outcome.seconds):
        return None
    return candidate.mfu * candidate.seconds / outcome.seconds


_COLUMNS = (
    _Column("#", "candidate", lambda c, o: c.number),
    _Column("method", "method", lambda c, o: c.method),
    _Column("data x tensor x pipeline x micro", "sizes", lambda c, o: c.sizes),
    _Column("s predicted", "predicted_seconds", lambda c, o: c.seconds, "{:.2f}"),
    _Column("s measured", "measured_seconds", lambda c, o: o.seconds, "{:.2f}"),
    _Column("MFU predicted", "predicted_mfu", lambda c, o: c.mfu, "{:.3f}"),
    _Column("MFU measured", "measured_mfu", _measured_mfu, "{:.3f}"),
    _Column("GiB predicted", "predicted_gib", lambda c, o: c.memory_gib, "{:.1f}"),
    _Column("GiB measured", "measured_gib", lambda c, o: o.memory_gib, "{:.1f}"),
    _Column("outcome", "outcome", lambda c, o: o.status),
)


def in_order(rows: Iterable[tuple[Candidate, Outcome]]) -> list[tuple[Candidate, Outcome]]:
    """Returns the fastest first, then those that failed."""
    return sorted(rows, key=lambda row: (row[1].status != "done", row[1].seconds or 0.0, row[0].number))


def _cells(row: tuple[Candidate, Outcome]) -> list[str]:
    values = [(column, column.value(*row)) for column in _COLUMNS]
    return ["-" if value is None else column.form.format(value) for column, value in values]


def as_csv(rows: Sequence[tuple[Candidate, Outcome]]) -> str:
    """Returns a line for each candidate, with empty cells for unknown values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in _COLUMNS])
    for row in rows:
        writer.writerow(["" if (value := column.value(*row)) is None else value for column in _COLUMNS])
    return text.getvalue()


def as_markdown(rows: Sequence[tuple[Candidate, Outcome]]) -> str:
    """Returns a Markdown table."""
    lines = [[column.title for column in _COLUMNS], ["---"] * len(_COLUMNS)]
    lines += [[cell.replace("|", "\\|") for cell in _cells(row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_text(rows: Sequence[tuple[Candidate, Outcome]]) -> str:
    """Returns a table for a terminal."""
    table = Table()
    for column in _COLUMNS:
        table.add_column(column.title, justify="left" if column.name in ("method", "sizes", "outcome") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(file=io.StringIO(), width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


_FORMATS = {"text": as_text, "csv": as_csv, "markdown": as_markdown}


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the folder and writes the table."""
    parser = Parser(prog="collect_sweep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the sweep's, with candidates.csv")
    parser.add_argument("--format", choices=_FORMATS, default="text")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--count", action="store_true", help="print the number of candidates instead")
    parser.add_argument("--flags", type=int, metavar="N", help="print the flags of candidate N instead, a word a line")
    arguments = parser.parse_args(argv)
    folder = arguments.folder
    try:
        candidates = read_candidates(folder / "candidates.csv")
        if arguments.count:
            text = f"{len(candidates)}\n"
        elif arguments.flags is not None:
            if not 0 <= arguments.flags < len(candidates):
                raise ValueError(
                    f"--flags: {folder} has no candidate {arguments.flags}; there are 0 to {len(candidates) - 1}"
                )
            text = "".join(f"{word}\n" for word in candidates[arguments.flags].flags)
        else:
            rows = [(c, read_outcome(folder / str(c.number), folder / f"job-{c.number}.out")) for c in candidates]
            text = _FORMATS[arguments.format](in_order(rows))
        if arguments.output is None:
            sys.stdout.write(text)
        else:
            emit(text, arguments.output)
    except PlanError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")
    except (ValueError, csv.Error) as error:
        return _refuse(str(error))
    return 0


def _refuse(message: str) -> int:
    sys.stderr.write(f"collect_sweep: error: {one_line(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
