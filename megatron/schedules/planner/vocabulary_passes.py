"""Adds the passes of vocabulary parallelism (S and T) to an order without them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from megatron.schedules.schedule.kinds import COUNTS_AS, Kind, Pass, Share
from megatron.schedules.schedule.schedule import Schedule, all_split
from megatron.schedules.schedule.simulator import peaks, sweep
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.polish import polished
from megatron.schedules.utils.progress import Progress, unheard

_Moment = tuple[float, int]
"""A time, and a turn that orders passes of zero duration."""
_LAST: _Moment = (math.inf, 0)
# Microbatches whose S may wait for their T, beyond those that wait in the order itself.
_FEW = 2


def share_output(base: Schedule, costs: StageCosts, progress: Progress = unheard, more: float = 1.0) -> Schedule:
    """Returns ``base`` with S and T on each rank, reordered to shorten the waiting time of the last stage.

    Each rank runs its S before the first pass that starts in ``base`` after the last stage's F has ended. It runs its T
    before the first pass that starts after the last stage's I has ended. There is no deadlock: each pass still comes
    after all passes that started before it. If S and T come before the same pass, the one that could start first is
    first. A T frees the memory that the S after it allocates. With a large vocabulary and few layers that is more than
    a microbatch.

    Args:
        base: an order without S and T.
        costs: costs with S and T, scaled to around 1, see :meth:`.costs.Costs.around_one`.
        progress: receives the progress of the reordering.
        more: memory that a rank may use beyond ``base``, microbatches. The input gradient of the last stage waits for
            all ranks; the paper (arXiv 2411.05288, section 5) also counts one microbatch for that. If this is more than
            the memory of a few S, that memory is added, so that a T can wait for a gap.
    """
    base = all_split(base)
    starts, ends, turns, _ = sweep(base, costs)  # turns order passes of zero duration
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
        for kind, moments in ended.items():
            placed += [(bisect_right(begun, end), end, Pass(stage, kind, m)) for m, end in moments.items()]
        rows.append(tuple(work for _, _, work in sorted(placed)))
    shared = replace(base, order=tuple(rows))
    waiting = _FEW * max(costs.held[Share.VOCABULARY])
    spare = more + (waiting if waiting <= more else 0.0)
    limits = [peak + spare for peak in peaks(shared, costs)]
    return polished(shared, costs, limits, progress)
