"""The passes of an output layer that all ranks share, put into an order that has none."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.kinds import COUNTS_AS, KINDS, Kind
from megatron.schedules.planning.list_scheduling import Policy
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.polish import finished
from megatron.schedules.planning.progress import Progress, unheard
from megatron.schedules.planning.reorder import improve
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import peaks, simulate

_ROUNDS = 40


def share_output(base: Schedule, costs: StageCosts, progress: Progress = unheard, more: float = 1.0) -> Schedule:
    """``base`` with S and T of every rank and microbatch, reordered for what the last stage then waits.

    Each rank does its S before the first pass that ``base`` starts once the last stage's F has ended, and its T before
    the first that starts once the last stage's I has. So nothing waits in a circle: every pass still comes after all
    that started before it.

    Args:
        base: an order without them.
        costs: with times of S and T.
        progress: hears how far the reordering is.
        more: microbatches that a rank may hold beyond ``base`` while the last stage's input gradient waits until all
            ranks have done their part; the paper (arXiv 2411.05288, section 5) counts one, too.
    """
    base = _in_parts(base)
    timeline, last = simulate(base, costs), base.placement.last_stage
    ended: dict[Kind, dict[int, float]] = {Kind.S: {}, Kind.T: {}}
    rank = base.placement.rank_of[last]
    for (stage, kind, m), end in zip(base.order[rank], timeline.end[rank], strict=True):
        if stage == last and kind is not Kind.W:
            ended[Kind.S if COUNTS_AS[kind] is Kind.F else Kind.T][m] = end
    rows = []
    for row, starts, rank in zip(base.order, timeline.start, range(base.ranks), strict=True):
        stage = base.placement.stages_of(rank)[-1]
        placed = [(index, 2, work) for index, work in enumerate(row)]
        for order, (kind, ends) in enumerate(ended.items()):
            placed += [(bisect_left(starts, end), order, Pass(stage, kind, m)) for m, end in ends.items()]
        rows.append(tuple(work for _, _, work in sorted(placed)))
    shared = replace(base, order=tuple(rows))
    lookahead = max(16, 2 * base.ranks)
    policies = [
        Policy(lookahead, defer_fillers=True, patience=0.5),
        *(Policy(lookahead, patience=patience) for patience in (0.0, 0.5, 1.0)),
        Policy(lookahead, patience=0.0, ends_only=True),
    ]
    limits = [peak + more for peak in peaks(shared, costs)]
    return finished(improve(shared, costs, limits, policies, _ROUNDS, progress), costs)


def _in_parts(schedule: Schedule) -> Schedule:
    """``schedule`` with each B as I and W, where it splits any: else a B might add gradients before a W."""
    if not schedule.splits:
        return schedule
    rows = (
        tuple(Pass(stage, part, m) for stage, kind, m in row for part in KINDS[kind].parts or (kind,))
        for row in schedule.order
    )
    return replace(schedule, order=tuple(rows))
