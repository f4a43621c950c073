"""Errors of predictions: of rows, of pairs of rows, and of schedules against 1F1B."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accuracy.fit import fitted
from benchmarks.accuracy.rows import Row, read
from megatron.schedules.estimate.devices import GIB

_FOLDER = Path(__file__).parent
# Measurements closer than this, as a ratio, are in no order.
_APART = 1.01


class Predicted(NamedTuple):
    """A row with its predictions.

    Args:
        row: the row.
        seconds: predicted seconds of an iteration.
        without: the same by a calibration that was fitted without the row's model; None if it was not.
    """

    row: Row
    seconds: float
    without: float | None = None

    @property
    def ratio(self) -> float:
        """Predicted over measured speed."""
        return self.row.measured / self.seconds

    @property
    def error(self) -> float:
        """Distance of the predicted time from the measured one, as a part of it."""
        return abs(self.seconds / self.row.measured - 1)

    @property
    def error_without(self) -> float:
        """The same by the calibration without the model."""
        assert self.without is not None, "it was fitted"
        return abs(self.without / self.row.measured - 1)


@dataclass(frozen=True)
class Run:
    """Schedules of one job on GPUs.

    Args:
        name: model, GPU and sizes.
        microbatches: those of an iteration with which the speeds fit best.
        speeds: for each schedule its speed relative to 1F1B, predicted and measured.
        memory: for each schedule its memory relative to 1F1B, predicted and measured.
        tokens: tokens per second and GPU of 1F1B, predicted and measured.
    """

    name: str
    microbatches: int
    speeds: Mapping[str, tuple[float, float]]
    memory: Mapping[str, tuple[float, float]]
    tokens: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Report:
    """All predictions.

    Args:
        rows: pretraining rows.
        left_out: number of rows of fine-tuning of all weights, and of models that are not known here.
        runs: schedules of the same job.
        adapters: rows of low-rank adapters, to which nothing is fitted.
    """

    rows: Sequence[Predicted]
    left_out: tuple[int, int] = (0, 0)
    runs: Sequence[Run] = field(default_factory=tuple)
    adapters: Sequence[Predicted] = field(default_factory=tuple)

    @property
    def pairs(self) -> dict[str, tuple[int, int]]:
        """Pairs of rows in the measured order, and all, of those that differ in GPU and of those in setting."""
        return {
            "GPU": _ordered(
                self.rows,
                lambda row: (row.name, row.release, row.precision),
                lambda row: row.gpu,
            ),
            "setting": _ordered(
                self.rows,
                lambda row: (row.name, row.gpu, row.precision),
                lambda row: replace(row.setting, model="", recompute=()),
            ),
        }


def measured(rows: Path | None = None) -> list[Mapping[str, Any]]:
    """Returns the records of published measurements, or those of a file of the same form."""
    records: list[Mapping[str, Any]] = json.loads((rows or _FOLDER / "measured.json").read_text())["rows"]
    return records


def report(records: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> Report:
    """Predicts all rows, and those of each model by numbers that are fitted to the others."""
    rows = read(records)
    counted = [row for row in rows if row.is_pretraining]
    times = {setting: setting.predicted() for setting in {row.setting for row in counted}}
    without: dict[Row, float] = {}
    for name in sorted({row.name for row in counted}):
        say(f"fitting without {name}")
        known = fitted([row for row in counted if row.name != name])
        settings = {row.setting for row in counted if row.name == name}
        without |= {setting: setting.predicted(known) for setting in settings}
    found = [Predicted(row, times[row.setting], without.get(row.setting)) for row in counted]
    adapters = [Predicted(row, row.predicted()) for row in rows if row.adapters]
    left_out = len(rows) - len(counted) - len(adapters), len(records) - len(rows)
    return Report(found, left_out, runs(say), adapters)


def runs(say: Callable[[str], None]) -> list[Run]:
    """Predicts the schedules that AMD measured."""
    found = []
    for record in json.loads((_FOLDER / "peers.json").read_text())["runs"]:
        row = Row(
            *("", record["model"], record["gpu"], "BF16", record["gpus"], 1, record["mbs"], record["seq"]),
            *(record["tp"], record["pp"], 1, 1, record["ep"], record["tokens"]["1f1b"]),
        )
        sizes = f"TP{row.tensor} PP{row.pipeline} EP{row.expert}"
        say(f"schedules of {row.name} on {row.gpu}")
        tried = [_run(f"{row.name} on {row.gpus} {row.gpu}, {sizes}", row, record, n) for n in record["microbatches"]]
        found.append(min(tried, key=_off))
    return found


def _run(name: str, row: Row, record: Mapping[str, Any], microbatches: int) -> Run:
    row = replace(row, batch=microbatches * row.micro * row.data)
    seconds, gib = {}, {}
    for schedule in record["tokens"]:
        job = row.planned(schedule=schedule)
        seconds[schedule] = job.plan.iteration_time + row.after()
        gib[schedule] = max(rank.device for rank in job.memory) / GIB
    tokens, memory = record["tokens"], record["gib"]
    return Run(
        name,
        microbatches,
        {each: (seconds["1f1b"] / seconds[each], tokens[each] / tokens["1f1b"]) for each in tokens},
        {each: (gib[each] / gib["1f1b"], memory[each] / memory["1f1b"]) for each in tokens},
        (row.batch * row.sequence / row.gpus / seconds["1f1b"], tokens["1f1b"]),
    )


def _off(run: Run) -> float:
    """Distance of all speeds from their measurements."""
    return sum(abs(predicted - found) for predicted, found in run.speeds.values())


def _ordered(
    rows: Sequence[Predicted], same: Callable[[Row], object], other: Callable[[Row], object]
) -> tuple[int, int]:
    right = every = 0
    for first, second in itertools.combinations(rows, 2):
        if same(first.row) != same(second.row) or other(first.row) == other(second.row):
            continue
        measured = second.row.tokens / first.row.tokens
        if max(measured, 1 / measured) < _APART:
            continue
        predicted = _tokens(second) / _tokens(first)
        every += 1
        right += (measured > 1) == (predicted > 1)
    return right, every


def _tokens(each: Predicted) -> float:
    return each.row.batch * each.row.sequence / (each.seconds * each.row.gpus)


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median error, the share of errors within 10 %, and the ninth tenth."""
    ordered = sorted(errors)
    return (
        median(ordered),
        sum(error <= 0.1 for error in ordered) / len(ordered),
        ordered[int(0.9 * (len(ordered) - 1))],
    )
