"""Polishing: from a base order to the schedule that is handed out.

A base order is squeezed: every pass starts as early as the order allows. Its warm-up and cool-down are reordered for
the costs given, within the memory limit. Then the backward is merged where its split serves nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.schedule.kinds import KINDS, WHOLES, everywhere, followers
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Schedule, in_microbatch_order, slots
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.reorder import improve
from megatron.schedules.utils.progress import Progress, unheard

# Scheduling a pass once takes some five microseconds: so many keep a plan of usual size within a second or two. A plan
# of any size is scheduled forward, backward and forward again, which keeps the time linear.
_PASSES = 250_000
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 60


def polish(base: Schedule, costs: StageCosts, limit: float, progress: Progress = unheard) -> Schedule:
    """Squeeze ``base``, reorder it within ``limit`` microbatches a rank, and merge what need not be split.

    Times are around 1, see :meth:`.costs.Costs.around_one`. Where every rank keeps more of a microbatch than its layers
    do, such as an attention mask, the limit grows with it.
    """
    where = base.placement
    own = [sum(costs.activation[stage] for stage in where.stages_of(rank)) for rank in range(where.ranks)]
    return polished(base, costs, [limit * max(1.0, min(own))] * base.ranks, progress)


def polished(base: Schedule, costs: StageCosts, limits: Sequence[float], progress: Progress = unheard) -> Schedule:
    """The same within a limit for each rank.

    Args:
        base: the order.
        costs: with times around 1, see :meth:`.costs.Costs.around_one`.
        limits: microbatches each rank may hold.
        progress: hears of every round.
    """
    # Two microbatches a rank reach everything that a rank could sensibly start ahead of its turn.
    lookahead = max(16, 2 * base.ranks)
    policies = [Policy(lookahead, patience=patience) for patience in (0.0, 0.5, 1.0)]
    ends = Policy(lookahead, patience=0.0, ends_only=True)
    if any(KINDS[kind].filler for kind in base.kinds):
        policies += [Policy(lookahead, defer_fillers=True, patience=0.5), ends]
    else:  # nothing fills gaps, so an order that is tight in its steady state is best left alone there
        policies.insert(0, ends)
    size = sum(map(len, base.order))
    rounds = max(_FEWEST_ROUNDS, min(_PASSES // size, _MOST_ROUNDS))
    return finished(improve(base, costs, limits, policies, rounds, progress), costs)


def finished(split: Schedule, costs: StageCosts) -> Schedule:
    """``split`` as it is handed out: microbatches in turn, and no I and W apart that need not be.

    Where microbatches are not alike they are in turn already, see :func:`.tasks.tasks_of`.
    """
    return merge_backward(simulate(in_microbatch_order(split) if costs.loads is None else split, costs))


def merge_backward(timeline: Timeline) -> Schedule:
    """Make an I and the W after it one B, wherever whoever waits for the I would still be in time for the B's end.

    Nothing moves in time; the whole backward spares the runtime the price of the split.
    """
    schedule, costs = timeline.schedule, timeline.costs
    rank_of = schedule.placement.rank_of
    places, rows = slots(schedule.placement, schedule.microbatches), []
    start = [math.inf] * (len(KINDS) * schedule.placement.stages * schedule.microbatches)
    for row, times in zip(schedule.order, timeline.start, strict=True):
        for (stage, kind, m), at in zip(row, times, strict=True):
            start[places[kind][stage] + m] = at
    waiting = {
        (stage, kind): [
            (places[each][other], costs.latency(rank_of[stage], rank_of[other]))
            for other, each in found
            if other != stage
        ]
        for (stage, kind), found in followers(schedule.placement, everywhere(schedule.placement)).items()
    }
    for row, ends in zip(schedule.order, timeline.end, strict=True):
        merged: list[Pass] = []
        for work, end in zip(row, ends, strict=True):
            stage, kind, m = work
            before = merged[-1] if merged else work
            whole = WHOLES.get((before.kind, kind))
            if whole is not None and before.stage == stage and before.microbatch == m:
                late = waiting[stage, before.kind]
                if all(start[place + m] + 1e-9 >= end + latency for place, latency in late):
                    merged[-1] = Pass(stage, whole, m)
                    continue
            merged.append(work)
        rows.append(tuple(merged))
    return replace(schedule, order=tuple(rows))
