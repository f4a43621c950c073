"""Explains a plan in a few lines, compared with the named schedules."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import amount, counted, percent

# Iteration times with a smaller relative difference count as equal. Gains of a flag are reported from the second
# number.
_SAME, _WORTH = 5e-4, 0.01


def explanation(
    timeline: Timeline,
    request: Request,
    named: Sequence[Timeline],
    peak_bytes: float | None = None,
    vocabulary_gain: float | None = None,
) -> str:
    """Explains the choice, its memory and its time, compared with 1F1B and the best named schedule.

    Args:
        timeline: the plan.
        request: the request of the plan, with its decisions settled.
        named: timelines of all named schedules at the same size.
        peak_bytes: peak activation memory of the worst rank, bytes; None if unknown.
        vocabulary_gain: share of the iteration time that vocabulary parallelism would save; None if unknown.
    """
    limit = request.memory_limit
    base = next((line for line in named if line.schedule.name == "1f1b"), None)
    said = "" if base is None else f"; the iteration is {_compared(timeline, base)} 1F1B's"
    size = request.limit_bytes
    within = "" if limit is None else f", within the limit of {percent(limit, 1) if size is None else amount(size)}"
    share = "" if timeline.of_1f1b is None else f"{percent(timeline.of_1f1b, 1)} of 1F1B's"
    used = share + within if peak_bytes is None else f"{amount(peak_bytes)}{within}{share and f'; {share}'}"
    counted_too = ""
    if peak_bytes is not None and timeline.limit > timeline.peak * (1 + _SAME):
        more = timeline.limit / timeline.peak * peak_bytes
        counted_too = f"; {amount(more)} with what its parameters take above the average"
    lines = [
        f"Schedule: {_chosen(timeline, request)}.",
        f"Activation memory: {used}{counted_too}.",
        f"Bubble: {percent(timeline.bubble, 1)}{said}.",
    ]
    if limit is not None:
        lines.append(_against_named(timeline, [line for line in named if request.allows(line)]))
    if vocabulary_gain is not None and vocabulary_gain >= _WORTH:
        lines.append(
            "Not chosen, as it changes the rounding of results: vocabulary parallelism would make the iteration some "
            f"{percent(vocabulary_gain, 0)} shorter (flag vocabulary-parallel)."
        )
    return "\n".join(lines)


def _against_named(timeline: Timeline, fitting: list[Timeline]) -> str:
    if not fitting:
        return "No schedule by name fits within the limit."
    best = min(fitting, key=lambda line: line.makespan)
    return (
        f"The shortest schedule by name within the limit is {best.schedule.name}, with a bubble of "
        f"{percent(best.bubble, 1)}; this one is {_compared(timeline, best)} it."
    )


def _chosen(timeline: Timeline, request: Request) -> str:
    decisions = request.decisions
    said = [f"{timeline.schedule.name} with {counted(timeline.schedule.placement.chunks, 'chunk')} a rank"]
    if decisions.layers is not None:
        said.append(f"layers by stage {','.join(map(str, decisions.layers))}")
    said += [f"{percent(share, 1)} of the layers {name}" for name, share in decisions.mean_savings.items()]
    return ", ".join(said)


def _compared(timeline: Timeline, other: Timeline) -> str:
    change = timeline.makespan / other.makespan - 1
    if abs(change) < _SAME:
        return "as long as"
    return f"{percent(abs(change), 1)} {'shorter' if change < 0 else 'longer'} than"
