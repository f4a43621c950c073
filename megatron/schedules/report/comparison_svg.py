"""A comparison as a drawing: each schedule a point, its bubble against its activation memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.report.figures import Figures, amount, title
from megatron.schedules.report.frontier_svg import Mark, draw_frontier
from megatron.schedules.report.table import Row
from megatron.schedules.utils.errors import PlanError

_BEYOND = 1.1  # of the largest memory and bubble, so that no point lies on an edge


def draw_comparison(rows: Sequence[Row], caption: str) -> str:
    """Draw ``rows`` as points with labels; the caption says which of them have no plan.

    Raises:
        PlanError: where none of them has one.
    """
    found = {row.name: row.result for row in rows if isinstance(row.result, Figures)}
    without = {row.name: row.result for row in rows if isinstance(row.result, str)}
    if not found:
        raise PlanError(f"no schedule can be drawn: {next(iter(without.values()), 'none was asked for')}")
    marks = [Mark(title(name), "", each.peak, 1 - each.useful) for name, each in found.items()]
    most = max(mark.memory for mark in marks), max(mark.bubble for mark in marks)
    said = [caption]
    if any(each.recomputed for each in found.values()):
        said.append("Recompute counts as bubble.")
    if without:
        said.append(f"Without a plan: {', '.join(map(title, without))}.")
    memory, bubble = (_BEYOND * each or 1.0 for each in most)
    one = max(each.microbatch_bytes for each in found.values())
    unit = f"microbatches of {amount(one)}" if one else "microbatches"
    return draw_frontier((), marks, "Bubble against activation memory", " ".join(said), (memory, bubble), unit=unit)
