"""A lower bound on the makespan of any schedule within a memory limit, by argument rather than by search."""

from __future__ import annotations

from itertools import accumulate, pairwise
from operator import add

from megatron.schedules.schedule.kinds import Kind, Share, stages_doing
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts


def lower_bound(placement: Placement, microbatches: int, costs: StageCosts, limit: float) -> float:
    """No schedule on ``placement`` that holds at most ``limit`` microbatches a rank ends sooner (same unit as costs).

    The largest of, for every rank,

    - its work, after the forwards that lead to it and before the input gradients that lead on from it;
    - its memory: each microbatch on a stage is held at least as long as its forward, all that comes after it, its
      input and its weight gradient take; these times times what is held must fit under the limit. What may be
      offloaded is on the host for all that time but for its own copies. What may be recomputed is free, for as many
      microbatches as make the bounds of work and of memory equal;

    and of the one chain of passes that a single microbatch is.
    """
    rank_of, n, last_stage = placement.rank_of, microbatches, placement.last_stage
    limits, durations = costs.limits(placement, limit), costs.durations
    forward, input_grad, weight_grad, redo = (durations[kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.R))
    recomputed, offloaded = costs.held[Share.RECOMPUTED], costs.held[Share.OFFLOADED]
    kept, left_to_w = costs.held[Share.FORWARD], costs.held[Share.WEIGHTS]
    # Of the message from each stage to the next, and of that back.
    onto = [costs.latency(rank, other) for rank, other in pairwise(rank_of)]
    back = [costs.latency(other, rank) for rank, other in pairwise(rank_of)]
    # All ranks together do what is between the last stage's F and its I.
    shared, last_rank = durations[Kind.S], rank_of[-1]
    parts = stages_doing(Kind.S, placement) if Kind.S in costs.times else []
    between = max(
        (shared[s] + costs.latency(last_rank, rank_of[s]) + costs.latency(rank_of[s], last_rank) for s in parts),
        default=0.0,
    )
    # From the start of F of stage s to the end of its I.
    span = [0.0] * placement.stages
    onward = between
    for s in range(last_stage, -1, -1):
        span[s] = forward[s] + onward + input_grad[s]
        onward = span[s] + (onto[s - 1] + back[s - 1]) if s else 0.0
    # Up to the start of F of stage s, and from the end of its I on.
    heads = list(accumulate(map(add, forward, onto), initial=0.0))
    tails = list(accumulate(map(add, input_grad, back), initial=0.0))
    bound = span[0] + min(weight_grad)
    for rank in range(placement.ranks):
        held = placement.stages_of(rank)
        passes = weights = occupied = 0.0
        spared = []
        for s in held:
            passes += forward[s] + shared[s] + input_grad[s]
            weights += weight_grad[s] + durations[Kind.T][s]
            # A whole backward may keep less for its W than a split one, and the other way round.
            occupied += (kept[s] + recomputed[s] + offloaded[s]) * span[s] + min(kept[s], left_to_w[s]) * weight_grad[s]
            # What is offloaded is there during its F, both copies and I, what is recomputed during its R and I.
            if offloaded[s]:
                copied = durations[Kind.O][s] + durations[Kind.L][s]
                occupied -= offloaded[s] * max(0.0, span[s] - (forward[s] + copied + input_grad[s]))
            if recomputed[s]:
                spared.append((n * redo[s], n * recomputed[s] * max(0.0, span[s] - (redo[s] + input_grad[s]))))
        head, tail = heads[held[0]], tails[held[0]]
        last = weight_grad[0] if held[0] else 0.0
        bound = max(bound, head + n * (passes + weights), head + n * passes + tail + last)
        if occupied:  # what holds nothing goes under any limit, even none
            bound = max(bound, head + _least_with_recompute(n * (passes + weights), n * occupied, limits[rank], spared))
    return bound


def _least_with_recompute(work: float, occupied: float, limit: float, spared: list[tuple[float, float]]) -> float:
    """The least time in which both the work can be done and what is held fits under the limit.

    Args:
        work: time of all passes but R.
        occupied: memory times time of all that is held where nothing is recomputed.
        limit: memory.
        spared: for each stage, the time to recompute all of it, and what of ``occupied`` that frees.
    """
    for time, less in sorted((each for each in spared if each[1]), key=lambda each: each[0] / each[1]):
        if work * limit >= occupied:
            break
        # Of this stage as much as brings both together, at most all.
        part = min(1.0, (occupied - work * limit) / (time * limit + less))
        work, occupied = work + part * time, occupied - part * less
    return max(work, occupied / limit)
