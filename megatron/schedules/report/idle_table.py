"""A table of where each rank's idle time lies, for pages: shares of the iteration that add up to the bubble."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.report.idle import Cause, Idle, Phase
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import percent

_BAR = 120  # pixels of the longest bar
_MOST_RANKS = 3  # that a row names
_CLASSES = {Phase.WARM_UP: "warm", Phase.STEADY: "steady", Phase.COOL_DOWN: "cool"}


def idle_table(timeline: Timeline, found: Sequence[Idle]) -> str:
    """An HTML table, a row a rank; at its foot the mean, whose idle share is the bubble."""
    whole, most = timeline.makespan, max(max(each.total for each in found), 1e-300)
    causes = [cause for cause in Cause if any(each.of(cause) > 1e-9 * whole for each in found)]
    heads = ["rank", "idle", *Phase, *causes]
    head = "".join(f"<th>{_key(name)}{name}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{each.rank}</td>{_cells(_amounts(each, causes), whole)}<td>{_bar(each, most)}</td>"
        f'<td class="words">{_whom(each, whole)}</td></tr>'
        for each in found
    )
    mean = [sum(each) / len(found) for each in zip(*(_amounts(each, causes) for each in found), strict=True)]
    return (
        f'<table><thead><tr>{head}<th class="words">by phase</th><th class="words">waits longest for</th></tr></thead>'
        f"<tbody>{body}</tbody><tfoot><tr><td>mean</td>{_cells(mean, whole)}<td></td><td></td></tr></tfoot></table>"
    )


def _key(name: str) -> str:
    """The colour of a phase in the bars."""
    if name not in _CLASSES:
        return ""
    return f'<svg class="bar" width="14" height="9"><rect class="{_CLASSES[Phase(name)]}" width="9" height="9"/></svg>'


def _amounts(each: Idle, causes: Sequence[Cause]) -> list[float]:
    return [each.total, *each.phases.values(), *(each.of(cause) for cause in causes)]


def _cells(amounts: Sequence[float], whole: float) -> str:
    return "".join(f"<td>{percent(amount / whole + 0.0, 2)}</td>" for amount in amounts)


def _bar(each: Idle, most: float) -> str:
    """The phases side by side."""
    left, parts = 0.0, []
    for phase, time in each.phases.items():
        wide = max(0.0, time / most * _BAR)
        parts.append(f'<rect class="{_CLASSES[phase]}" x="{left:.1f}" width="{wide:.1f}" height="10"/>')
        left += wide
    return f'<svg class="bar" width="{_BAR}" height="10" aria-hidden="true">{"".join(parts)}</svg>'


def _whom(each: Idle, whole: float) -> str:
    named = [f"rank {rank} ({percent(time / whole, 1)})" for rank, time in each.for_ranks[:_MOST_RANKS]]
    return ", ".join(named) or "nobody"
