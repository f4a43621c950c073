#!/usr/bin/env python3
"""Shows the progress of a training from its output, and compares training logs as a table.

    pretrain ... 2>&1 | python scripts/compare_logs.py --follow .demo/v-half.log
    python scripts/compare_logs.py v-half=.demo/v-half.log 1f1b=.demo/1f1b.log

Reads Megatron's iteration lines and arguments, and the lines of the pipeline schedule about its plan and memory. What
a log lacks is shown as a dash. What all logs lack is left out. The last log is the baseline.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.printable import printable

_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
_ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) \|")
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\): +{_NUMBER}")
_LOSS = re.compile(rf"\blm loss: +{_NUMBER}")
_BATCH = re.compile(r"global batch size: +(\d+)")
_SEQUENCE = re.compile(r"^ *seq_length \.+ (\d+)\s*$")
_VALIDATION = re.compile(rf"validation loss at .* on validation set .*\blm loss value: +{_NUMBER}")
_PLAN = re.compile(
    rf"pipeline schedule: (\S+)[:,] .*planned bubble {_NUMBER} %, planned peak activation memory "
    rf"(?:[\d.]+ [GM]iB,? )?(?:{_NUMBER} %)?"
)
_WORTH_SHOWING = re.compile(r"pipeline schedule: (?!measured: )|validation loss at|\berror: ")
_MEASURED = re.compile(r"pipeline schedule: peak activation memory measured: .*worst (\d+) bytes")


class Iteration(NamedTuple):
    """One iteration line of a log.

    number, of: the iteration, and how many the job has.
    elapsed: milliseconds.
    samples: of one global batch.
    loss: of the iteration; None if the line has none.
    """

    number: int
    of: int
    elapsed: float
    samples: int
    loss: float | None

    def tokens_per_second(self, sequence: int) -> float:
        """Tokens per second of the whole job, with ``sequence`` tokens per sample."""
        return self.samples * sequence / self.elapsed * 1000


class Run(NamedTuple):
    """One training, as its log describes it; None for what the log lacks.

    sequence: tokens.
    bubble: planned, per cent.
    planned_memory: peak activation memory, per cent of 1F1B's.
    measured_memory: peak activation memory of the worst rank, bytes.
    """

    iterations: tuple[Iteration, ...]
    sequence: int | None
    validation_loss: float | None
    bubble: float | None
    planned_memory: float | None
    measured_memory: int | None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the iterations, without the first, which also allocates and compiles."""
        timed = self.iterations[1:] or self.iterations
        if not timed or self.sequence is None:
            return None
        return statistics.median(iteration.tokens_per_second(self.sequence) for iteration in timed)


def read_iteration(line: str) -> Iteration | None:
    """Reads an iteration line; returns None for any other line."""
    number, elapsed, batch = _ITERATION.search(line), _ELAPSED.search(line), _BATCH.search(line)
    if not (number and elapsed and batch):
        return None
    loss = _LOSS.search(line)
    return Iteration(int(number[1]), int(number[2]), float(elapsed[1]), int(batch[1]), float(loss[1]) if loss else None)


def read_log(text: str) -> Run:
    """Reads a training log."""
    iterations = []
    sequence = validation = bubble = planned = measured = None
    for line in text.splitlines():
        if iteration := read_iteration(line):
            iterations.append(iteration)
        elif found := _SEQUENCE.search(line):
            sequence = int(found[1])
        elif found := _VALIDATION.search(line):
            validation = float(found[1])
        elif found := _PLAN.search(line):
            bubble, planned = float(found[2]), float(found[3]) if found[3] else None
        elif found := _MEASURED.search(line):
            measured = int(found[1])
    return Run(tuple(iterations), sequence, validation, bubble, planned, measured)


def follow(lines: Iterable[str], log: TextIO) -> Iterator[str]:
    """Copies ``lines`` to ``log`` as they arrive, and yields those that a user wants to see."""
    sequence = None
    for line in lines:
        log.write(line)
        log.flush()
        if iteration := read_iteration(line):
            shown = f"  iteration {iteration.number} of {iteration.of}:"
            if iteration.loss is not None:
                shown += f" loss {iteration.loss:.4f},"
            if sequence is not None:
                shown += f" {iteration.tokens_per_second(sequence):.0f} tokens/s,"
            yield f"{shown} {iteration.elapsed:.0f} ms"
        elif found := _SEQUENCE.search(line):
            sequence = int(found[1])
        elif _WORTH_SHOWING.search(line):
            yield f"  {line.strip(' |' + chr(10))}"


class _Row(NamedTuple):
    title: str
    value: Callable[[Run], float | None]
    form: str
    ratio: bool = False


def _first_loss(run: Run) -> float | None:
    return run.iterations[0].loss


def _last_loss(run: Run) -> float | None:
    return run.iterations[-1].loss


def _mebibytes(run: Run) -> float | None:
    return None if run.measured_memory is None else run.measured_memory / 2**20


_ROWS = (
    _Row("iterations", lambda run: len(run.iterations), "{:.0f}"),
    _Row("loss at the first iteration", _first_loss, "{:.4f}"),
    _Row("loss at the last iteration", _last_loss, "{:.4f}"),
    _Row("validation loss", lambda run: run.validation_loss, "{:.4f}"),
    _Row("tokens per second", lambda run: run.tokens_per_second, "{:.0f}", ratio=True),
    _Row("planned bubble", lambda run: run.bubble, "{:.1f} %"),
    _Row("planned peak activation memory, of 1F1B's", lambda run: run.planned_memory, "{:.1f} %", ratio=True),
    _Row("measured peak activation memory, worst rank", _mebibytes, "{:.2f} MiB", ratio=True),
)


def table(runs: Sequence[tuple[str, Run]]) -> str:
    """The comparison as text: a row per quantity, a column per run, and each run's ratio to the last one."""
    baseline_name, baseline = runs[-1]
    names = [name for name, _ in runs]
    lines = [["", *names, *(f"{name} / {baseline_name}" for name in names[:-1])]]
    for row in _ROWS:
        values = [row.value(run) for _, run in runs]
        if all(value is None for value in values):
            continue
        base = row.value(baseline)
        cells = ["-" if value is None else row.form.format(value) for value in values]
        for value in values[:-1]:
            cells.append(f"{value / base:.2f}" if row.ratio and value is not None and base else "")
        lines.append([row.title, *cells])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns; the first column is text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("logs", nargs="*", metavar="NAME=LOG", help="a name for the column, and the log to read")
    parser.add_argument("--follow", metavar="LOG", help="copy standard input to LOG and show the progress")
    arguments = parser.parse_args(argv)
    if (arguments.follow is None) == (not arguments.logs):
        parser.error("give either NAME=LOG ... or --follow LOG")
    try:
        if arguments.follow is not None:
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
            with Path(arguments.follow).open("w", encoding="utf-8") as log:
                for line in follow(sys.stdin, log):
                    print(printable(line), flush=True)
            return 0
        runs = [_named_run(argument) for argument in arguments.logs]
    except OSError as error:
        parser.error(one_line(f"{error.filename or arguments.follow}: {error.strerror}"))
    except ValueError as error:
        parser.error(one_line(str(error)))
    print(table(runs))
    return 0


def _named_run(argument: str) -> tuple[str, Run]:
    name, _, path = argument.partition("=")
    if not (name and path):
        raise ValueError(f"{argument}: write NAME=LOG")
    run = read_log(Path(path).read_text(encoding="utf-8", errors="replace"))
    if not run.iterations:
        raise ValueError(f"{path}: it has no iteration line of Megatron; did the training end early?")
    return printable(name), run


if __name__ == "__main__":
    sys.exit(main())
