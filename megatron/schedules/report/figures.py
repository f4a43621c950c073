"""Figures of a plan, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.schedules.schedule.simulator import Timeline, whole_peaks
from megatron.schedules.utils.printable import amount, percent, printable_name

_EPSILON = 1e-9


@dataclass(frozen=True)
class Figures:
    """Figures of one timeline.

    Args:
        name: name of the schedule.
        ranks: pipeline ranks.
        microbatches: microbatches of an iteration.
        chunks: chunks of one rank.
        makespan: iteration time, in the unit of the costs.
        bubble: share of the iteration time in which an average rank is idle.
        span_bubble: bubble as the papers define it, with each rank's time counted from its own first start.
        peaks: peak activation memory of every rank, in microbatches.
        share: the worst rank's peak over 1F1B's d microbatches, as in a memory limit.
        useful: share of the iteration time in which an average rank computes, without recompute.
        recomputed: share of the computing time that is recompute.
        copying: share of the iteration time in which the busiest copy channel copies.
        hidden, exposed: shares of the iteration time in which weight gradients run while messages of an average rank's
            experts travel, and in which the rank waits for these messages.
        microbatch_bytes: bytes of a microbatch's activations on an average rank; 0 if unknown.
        is_plain: false under Megatron's own recompute, where 1F1B holds less than d microbatches.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    makespan: float
    bubble: float
    span_bubble: float
    peaks: tuple[float, ...]
    share: float
    useful: float
    recomputed: float = 0.0
    copying: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    microbatch_bytes: float = 0.0
    is_plain: bool = True

    @property
    def of_1f1b(self) -> str:
        """The share in words; empty where the job's own 1F1B does not hold d microbatches."""
        return f"{percent(self.share, 1)} of 1F1B's" if self.is_plain else ""

    @property
    def peak(self) -> float:
        """Peak activation memory of the worst rank, in microbatches."""
        return max(self.peaks)

    @property
    def peak_bytes(self) -> float:
        """Peak activation memory of the worst rank, in bytes; 0 if unknown."""
        return self.peak * self.microbatch_bytes

    @property
    def worst(self) -> int:
        """The first rank with the highest peak."""
        return self.peaks.index(self.peak)

    @property
    def savings(self) -> tuple[tuple[str, float], ...]:
        """Shares of recompute, copies and messages of experts by name; empty without them."""
        recomputed = (("recomputed", self.recomputed), ("useful", self.useful)) if self.recomputed else ()
        messages = (("messages hidden", self.hidden), ("exposed", self.exposed)) if self.has_messages else ()
        return recomputed + ((("copying", self.copying),) if self.copying else ()) + messages

    @property
    def has_messages(self) -> bool:
        """True if messages of experts take time that weight gradients may hide."""
        return self.hidden + self.exposed > 0


def figures(timeline: Timeline, microbatch_bytes: float = 0.0) -> Figures:
    """Computes the figures of ``timeline``."""
    schedule, peaks = timeline.schedule, whole_peaks(timeline.schedule, timeline.costs)
    return Figures(
        name=schedule.name,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        chunks=schedule.placement.chunks,
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        span_bubble=timeline.span_bubble,
        peaks=peaks,
        share=max(peaks) / schedule.ranks,
        useful=timeline.useful,
        recomputed=timeline.recomputed,
        copying=timeline.copying,
        hidden=timeline.messages[0],
        exposed=timeline.messages[1],
        microbatch_bytes=microbatch_bytes,
        is_plain=timeline.of_1f1b is not None,
    )


def above_itself(plans: Iterable[Figures]) -> str:
    """Explains why 1F1B uses more than 100 % of 1F1B's memory, if one of ``found`` does."""
    if not any(plan.is_plain and plan.name == "1f1b" and plan.share > 1 + _EPSILON for plan in plans):
        return ""
    return (
        "100 % of 1F1B's memory is what d microbatches hold in the layers of an average rank, d being the pipeline "
        "size; the embedding, the output layer and what a stage has beyond the average come on top, under 1F1B too."
    )


def title(name: str) -> str:
    """Writes a schedule's name as a heading: ``v-half`` is V-Half, ``zb-1p`` ZB-1P, ``eager-1f1b`` Eager-1F1B.

    Names from files become printable and short.
    """
    if name.lower().endswith(".csv"):
        return printable_name(name)
    parts = printable_name(name).split("-")
    return "-".join(part.upper() if len(part) < 3 or part[0].isdigit() else part.capitalize() for part in parts)


def number(value: float) -> str:
    """Writes a number without needless digits: ``3``, ``2.5``, ``1.333``, ``5.77e-09``."""
    return f"{round(value, 3):.10g}" if abs(value) >= 0.1 else f"{value:.3g}"


def microbatches(held: float, microbatch_bytes: float = 0.0) -> str:
    """Writes memory with its unit: ``1 microbatch``, ``2.5 microbatches``, ``3 microbatches (1.50 GiB)``."""
    text = f"{number(held)} microbatch{'' if held == 1 else 'es'}"
    return f"{text} ({amount(held * microbatch_bytes)})" if microbatch_bytes else text


def ticks(until: float, fewest_apart: float) -> list[float]:
    """Returns round times from 0 to ``until``, at least ``fewest_apart`` apart.

    Steps are 1, 2 or 5 times a power of ten.
    """
    power = 10.0 ** math.floor(math.log10(fewest_apart))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= fewest_apart * (1 - 1e-9))
    return [index * step for index in range(int(until / step + 1e-9) + 1)]
