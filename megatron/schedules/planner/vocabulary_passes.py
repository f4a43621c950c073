"""The passes of an output layer that all ranks share, put into an order that has none."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from megatron.schedules.schedule.kinds import COUNTS_AS, KINDS, Kind, Share
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks, sweep
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.polish import polished
from megatron.schedules.utils.progress import Progress, unheard

_Moment = tuple[float, int]
"""A time, and the turn that tells what comes first of what takes none."""
_LAST: _Moment = (math.inf, 0)
# Microbatches whose S may wait for their T beyond those that the order makes wait.
_FEW = 2


def share_output(base: Schedule, costs: StageCosts, progress: Progress = unheard, more: float = 1.0) -> Schedule:
    """``base`` with S and T of every rank and microbatch, reordered for what the last stage then waits.

    Each rank does its S before the first pass that ``base`` starts once the last stage's F has ended, and its T before
    the first that starts once the last stage's I has. So nothing waits in a circle: every pass still comes after all
    that started before it. Where both come before the same pass, what could start first comes first: a T gives back
    what the S after it takes, and with many words and few layers that is more than a microbatch.

    Args:
        base: an order without them.
        costs: under which it has them, with times around 1, see :meth:`.costs.Costs.around_one`.
        progress: hears how far the reordering is.
        more: microbatches that a rank may hold beyond ``base`` while the last stage's input gradient waits until all
            ranks have done their part; the paper (arXiv 2411.05288, section 5) counts one, too. Where that is more
            than a few S hold, these come on top: they let a T wait for a gap.
    """
    base = _in_parts(base)
    starts, ends, turns, _ = sweep(base, costs)  # turns tell what comes first of what takes no time
    last = base.placement.last_stage
    rank = base.placement.rank_of[last]
    ended: dict[Kind, dict[int, _Moment]] = {Kind.S: {}, Kind.T: {}}
    for (stage, kind, m), end in zip(base.order[rank], zip(ends[rank], turns[rank], strict=True), strict=True):
        if stage == last and kind is not Kind.W:
            ended[Kind.S if COUNTS_AS[kind] is Kind.F else Kind.T][m] = end
    rows = []
    for rank, row in enumerate(base.order):
        stage, begun = base.placement.stages_of(rank)[-1], list(zip(starts[rank], turns[rank], strict=True))
        placed = [(index, _LAST, work) for index, work in enumerate(row)]
        for kind, each in ended.items():
            placed += [(bisect_right(begun, end), end, Pass(stage, kind, m)) for m, end in each.items()]
        rows.append(tuple(work for _, _, work in sorted(placed)))
    shared = replace(base, order=tuple(rows))
    waiting = _FEW * max(costs.held[Share.VOCABULARY])
    spare = more + (waiting if waiting <= more else 0.0)
    limits = [peak + spare for peak in peaks(shared, costs)]
    return polished(shared, costs, limits, progress)


def _in_parts(schedule: Schedule) -> Schedule:
    """``schedule`` with each B as I and W, where it splits any: else a B might add gradients before a W."""
    if not schedule.splits:
        return schedule
    rows = (
        tuple(Pass(stage, part, m) for stage, kind, m in row for part in KINDS[kind].parts or (kind,))
        for row in schedule.order
    )
    return replace(schedule, order=tuple(rows))
