"""Compares a job with stock's: to the bit where stock's own runs agree so, else within rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Trained(Protocol):
    """The compared results of a job: see :class:`.jobs.Ran`."""

    @property
    def losses(self) -> Sequence[float]: ...
    @property
    def norms(self) -> Sequence[float]: ...
    @property
    def gradients(self) -> Mapping[str, str]: ...


class Tolerance(NamedTuple):
    """Allowed relative differences of losses and norms from stock's."""

    loss: float
    norm: float


FP32 = Tolerance(1e-5, 1e-4)
BF16 = Tolerance(2e-3, 2e-2)


def same_bits(one: Trained, other: Trained) -> bool:
    """Whether two runs of one job agree to the bit, gradients and losses."""
    return one.gradients == other.gradients and list(one.losses) == list(other.losses)


def compared(
    ours: Trained, stock: Trained, iterations: int, tolerance: Tolerance, *, to_the_bit: bool
) -> tuple[dict[str, Any], str]:
    """Returns the figures, and what is wrong with them; empty for nothing."""
    equal = sum(ours.gradients.get(name) == value for name, value in stock.gradients.items())
    loss, norm = _apart(ours.losses, stock.losses), _apart(ours.norms, stock.norms)
    row: dict[str, Any] = {
        "last loss": ours.losses[-1] if ours.losses else math.nan,
        "losses apart": loss,
        "norms apart": norm,
    }
    if stock.gradients:
        row["gradients equal to the bit"] = f"{equal} of {len(stock.gradients)}"
    fault = ""
    if not len(ours.losses) == len(ours.norms) == len(stock.losses) == iterations:
        fault = f"{len(ours.losses)} losses and {len(ours.norms)} norms in {iterations} iterations"
    elif not loss <= tolerance.loss:
        fault = f"losses differ from stock's by {loss:.2g} of them, more than {tolerance.loss:g}"
    elif not norm <= tolerance.norm:
        fault = f"norms differ from stock's by {norm:.2g} of them, more than {tolerance.norm:g}"
    elif to_the_bit and not equal == len(stock.gradients) == len(ours.gradients):
        differing = next((n for n, value in stock.gradients.items() if ours.gradients.get(n) != value), "more names")
        fault = f"gradients differ, that of {differing}, where stock's own two runs agree to the bit"
    return row, fault


def _apart(ours: Sequence[float], stock: Sequence[float]) -> float:
    """Returns the largest relative difference; NaN where there is one, or nothing to compare."""
    found = [abs(our - its) / abs(its) if its else math.nan for our, its in zip(ours, stock, strict=False)]
    return math.nan if not found or any(map(math.isnan, found)) else max(found)
