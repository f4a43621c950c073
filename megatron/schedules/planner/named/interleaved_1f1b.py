"""Interleaved 1F1B: several chunks per rank, for any number of microbatches (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import interleaved
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import PlanError


def interleaved_1f1b(request: Request) -> Schedule:
    """Interleaved 1F1B: microbatches go through one chunk after another in groups of d. The last group may be smaller.

    Rank r runs 2 (d - 1 - r) + (v - 1) d forwards ahead, then one forward and one backward in turn.
    """
    d, n, v = request.ranks, request.microbatches, request.chunks
    if v < 2:
        raise PlanError(
            f"interleaved-1f1b needs at least 2 chunks a rank, not {v}; with 1 chunk ask for 1f1b", "chunks"
        )
    # If d does not divide n: the order for the next multiple, without its first few microbatches. Removing passes from
    # an order adds no deadlock, no time and no memory.
    short = -n % d
    placement, rows = interleaved(d, v), []
    for rank in range(d):
        stages = placement.stages_of(rank)
        forwards, backwards = [], []
        for first in range(-short, n, d):
            group = range(first, first + d)
            forwards += [Pass(stage, Kind.F, m) for stage in stages for m in group]
            backwards += [Pass(stage, Kind.B, m) for stage in reversed(stages) for m in group]
        warm = min((n + short) * v, 2 * (d - 1 - rank) + (v - 1) * d)
        row = forwards[:warm]
        for index, backward in enumerate(backwards):
            row += [*forwards[warm + index : warm + index + 1], backward]
        rows.append(tuple(work for work in row if work.microbatch >= 0))
    return Schedule(request.schedule, placement, n, tuple(rows))
