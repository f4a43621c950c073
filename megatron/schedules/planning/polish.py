"""Polishing: from a base order to the schedule that is handed out.

The base order is squeezed and its warm-up and cool-down reordered under the costs given, within the memory limit; then
every I and W that stand together, and that nobody waits between, become one whole backward.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planning.costs import Costs, StageCosts
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.progress import Progress, unheard
from megatron.schedules.planning.reorder import Policy, improve
from megatron.schedules.planning.schedule import Schedule, in_turn
from megatron.schedules.planning.simulate import Timeline, simulate

# Playing a pass once takes some five microseconds: so many keep a plan of usual size within a second or two. A plan of
# any size is played forward, backward and forward again, which keeps the time linear.
_PASSES_PLAYED = 250_000
_FEWEST_PLAYS, _MOST_PLAYS = 5, 60


def polish(base: Schedule, costs: Costs, limit: float, progress: Progress = unheard) -> Schedule:
    """Squeeze ``base``, reorder it within ``limit`` microbatches a rank, and join what need not be split."""
    on_stages = costs.around_one()[0].on(base.placement)
    # A window of two microbatches a rank reaches everything a rank could sensibly start ahead of its turn.
    window = max(16, 2 * base.ranks)
    policies = [Policy(window, False, patience) for patience in (0.0, 0.5, 1.0)]
    ends = Policy(window, False, 0.0, ends_only=True)
    if any(work.kind is Kind.W for _, work in base.passes()):
        policies += [Policy(window, True, 0.5), ends]
    else:  # nothing fills gaps, so an order that is tight in its steady state is best left alone there
        policies.insert(0, ends)
    size = sum(map(len, base.order))
    plays = max(_FEWEST_PLAYS, min(_PASSES_PLAYED // size, _MOST_PLAYS))
    best = improve(base, on_stages, [limit] * base.ranks, policies, plays, progress)
    return finished(best, on_stages)


def finished(split: Schedule, costs: StageCosts) -> Schedule:
    """``split`` as it is handed out: microbatches in turn, and no I and W apart that need not be."""
    return join(simulate(in_turn(split), costs))


def join(timeline: Timeline) -> Schedule:
    """Make one B of every I directly followed by its W whose result nobody waits for before the W has ended.

    Nothing moves in time; the whole backward spares the runtime the price of the split.
    """
    schedule, costs = timeline.schedule, timeline.costs
    rank_of = schedule.placement.rank_of
    start = {
        work: at
        for row, times in zip(schedule.order, timeline.start, strict=True)
        for work, at in zip(row, times, strict=True)
    }
    rows = []
    for row, ends in zip(schedule.order, timeline.end, strict=True):
        joined: list[Pass] = []
        for work, end in zip(row, ends, strict=True):
            stage, kind, m = work
            if kind is Kind.W and joined and joined[-1] == Pass(stage, Kind.I, m):
                waiting = start.get(Pass(stage - 1, Kind.I, m), start.get(Pass(stage - 1, Kind.B, m)))
                hop = costs.comm if stage and rank_of[stage - 1] != rank_of[stage] else 0.0
                if waiting is None or waiting + 1e-9 >= end + hop:
                    joined[-1] = Pass(stage, Kind.B, m)
                    continue
            joined.append(work)
        rows.append(tuple(joined))
    return replace(schedule, order=tuple(rows))
