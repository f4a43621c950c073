"""Fits the numbers of :mod:`megatron.schedules.estimate.calibration` that are marked *fitted* to measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.rows import Row
from megatron.schedules.estimate.calibration import CALIBRATED, REACHED, Calibration

Vector = NDArray[np.float64]

_ARCHITECTURES = "hopper", "blackwell", "blackwell ultra"
_OF_EXPERTS = "messages", "routed_passes", "experts_host", "partial_graphs", "fused_dispatch"
_OTHERS = "block_scaled", *_OF_EXPERTS
NAMES = (*(f"products, {name}" for name in _ARCHITECTURES), "attention", *_OTHERS)
"""What is fitted, in the order of the vectors here."""

# What to expect without these measurements, and a usual ratio to it; a number that the rows say little about stays near
# it. Large products reach some three quarters of the peak. F and I permute tokens, pad them, and put them back, two
# passes each time, and so before and after the messages. A layer with experts launches some thousand kernels, half of
# them in what partial graphs capture. HybridEP permutes tokens where it sends them, half of these passes.
_EXPECTED = (*(0.75,) * len(_ARCHITECTURES), 2.0, 0.95, 0.1, 16.0, 5e-3, 0.5, 0.5)
_RATIO = math.log(1.25)

# Errors of this size and beyond count less than their square, so that no odd row decides.
_USUAL = 0.06
_STEPS, _TRIES, _CHANGE, _ENOUGH = 6, 5, 1e-3, 1e-3
_MOST = 6.0  # times the number to start from


def numbers(known: Calibration) -> Vector:
    """Returns the fitted numbers of ``known``."""
    reached = [known.reached[name].products for name in _ARCHITECTURES]
    attention = known.reached[_ARCHITECTURES[0]].attention
    return np.array([*reached, attention, *(getattr(known, name) for name in _OTHERS)])


def calibration(found: Vector) -> Calibration:
    """Returns the calibration with these numbers."""
    values = dict(zip(NAMES, map(float, found), strict=True))
    reached = {
        name: REACHED[name]._replace(products=values[f"products, {name}"], attention=values["attention"])
        for name in _ARCHITECTURES
    }
    return replace(CALIBRATED, reached={**REACHED, **reached}, **{name: values[name] for name in _OTHERS})


def fitted(rows: Sequence[Row]) -> Calibration:
    """Returns the calibration with the least errors on ``rows``.

    A number that the rows say little about stays near what is expected. While it is fitted, a row's time is in
    proportion to that of its busiest rank, as in the plan with today's numbers.
    """
    start = numbers(CALIBRATED)
    settings = {row.setting for row in rows}
    stretched = {each: each.stretch for each in settings}
    known_times: dict[tuple[Row, tuple[float, ...]], float] = {}

    def seconds(setting: Row, found: Vector) -> float:
        """Its time with ``found``, computed once for the same values of the numbers that it depends on."""
        values = tuple(float(found[NAMES.index(name)]) for name in _read_by(setting))
        if (setting, values) not in known_times:
            known = calibration(found)
            known_times[setting, values] = stretched[setting] * setting.busiest(known) + setting.after(known)
        return known_times[setting, values]

    def errors(scaled: Vector) -> Vector:
        times = {each: seconds(each, scaled * start) for each in settings}
        off = [math.log(times[row.setting] / row.measured) for row in rows]
        return np.array([*off, *(_USUAL / _RATIO * np.log(np.maximum(scaled * start, 1e-6) / _EXPECTED))])

    return calibration(_least(errors, np.ones(len(start))) * start)


def _read_by(row: Row) -> tuple[str, ...]:
    """Names of the numbers that the row's time depends on."""
    names = f"products, {row.device.architecture}", "attention", "block_scaled"
    return (*names, *_OF_EXPERTS) if row.has_experts else names


def _least(errors: Callable[[Vector], Vector], at: Vector) -> Vector:
    """Gauss-Newton steps, damped, on a loss that is a square near 0 and a line far from it."""
    found, damping = errors(at), 1e-3
    for _ in range(_STEPS):
        slopes = np.zeros((len(found), len(at)))
        for column in range(len(at)):
            moved = at.copy()
            moved[column] += _CHANGE
            slopes[:, column] = (errors(moved) - found) / _CHANGE
        weights = 1 / np.sqrt(1 + (found / _USUAL) ** 2)
        before = _loss(found)
        for _ in range(_TRIES):
            square = slopes.T @ (weights[:, None] * slopes) + damping * np.eye(len(at))
            moved = np.clip(at - np.linalg.solve(square, slopes.T @ (weights * found)), 1 / _MOST, _MOST)
            tried = errors(moved)
            if _loss(tried) < before:
                break
            damping *= 10
        else:
            return at
        at, found, damping = moved, tried, damping / 10
        if before - _loss(found) < _ENOUGH * before:
            break
    return at


def _loss(errors: Vector) -> float:
    return float(np.sum(np.sqrt(1 + (errors / _USUAL) ** 2) - 1))
