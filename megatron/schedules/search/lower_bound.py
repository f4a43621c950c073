"""Lower bound of the makespan of any schedule within a memory limit, computed without a search."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from operator import add

from megatron.schedules.schedule.kinds import Kind, Share, stages_doing
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts


def lower_bound(placement: Placement, microbatches: int, costs: StageCosts, limit: float) -> float:
    """Returns a makespan that no schedule on ``placement`` within ``limit`` can beat, in the unit of the costs.

    It is the largest of these bounds, the first two for each rank:

    - Work: the time of its passes, after the forwards that lead to its first pass and before the input gradients that
      follow its last one.
    - Memory: a microbatch on a stage uses memory at least during its forward, all later stages, its input gradient and
      its weight gradient. The sum of memory times time must fit within the limit. Offloaded memory is on the host all
      this time except during its own copies. Recomputed memory is free, for as many microbatches as make the bounds of
      work and memory equal.
    - Chain: the passes of a single microbatch.

    Args:
        limit: memory limit, microbatches on an average rank.
    """
    rank_of, n, last_stage = placement.rank_of, microbatches, placement.last_stage
    # Backwards may be whole.
    limits, durations = costs.limits(placement, limit), costs.without_splitting.durations
    forward, input_grad, weight_grad, redo = (durations[kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.R))
    messages = costs.of_messages
    recomputed, offloaded = costs.held[Share.RECOMPUTED], costs.held[Share.OFFLOADED]
    kept, left_to_w = costs.held[Share.FORWARD], costs.held[Share.WEIGHTS]
    # Latency of the message from each stage to the next, and of the one back.
    onto = [costs.latency(rank, other) for rank, other in pairwise(rank_of)]
    back = [costs.latency(other, rank) for rank, other in pairwise(rank_of)]
    # With vocabulary parallelism all ranks share the work between the last stage's F and its I.
    shared, last_rank = durations[Kind.S], rank_of[-1]
    parts = stages_doing(Kind.S, placement) if Kind.S in costs.times else []
    between = max(
        (shared[s] + costs.latency(last_rank, rank_of[s]) + costs.latency(rank_of[s], last_rank) for s in parts),
        default=0.0,
    )
    # Time from the start of F of stage s to the end of its I.
    span = [0.0] * placement.stages
    onward = between
    for s in range(last_stage, -1, -1):
        span[s] = forward[s] + onward + input_grad[s]
        onward = span[s] + (onto[s - 1] + back[s - 1]) if s else 0.0
    # Time until the start of F of stage s, and from the end of its I.
    heads = list(accumulate(map(add, forward, onto), initial=0.0))
    tails = list(accumulate(map(add, input_grad, back), initial=0.0))
    bound = span[0] + min(weight_grad)
    for rank in range(placement.ranks):
        held = placement.stages_of(rank)
        passes = weights = split = behind = occupied = 0.0
        spared = []
        for s in held:
            passes += forward[s] + shared[s] + input_grad[s]
            weights += durations[Kind.T][s]
            split += weight_grad[s]
            behind += messages[Kind.F][s] + messages[Kind.I][s] + messages[Kind.R][s]
            # A whole backward may keep less memory for its W than a split one, or more.
            occupied += (kept[s] + recomputed[s] + offloaded[s]) * span[s] + min(kept[s], left_to_w[s]) * weight_grad[s]
            # Offloaded memory is allocated during its F, both copies and I, recomputed memory during its R and I.
            if offloaded[s]:
                copied = durations[Kind.O][s] + durations[Kind.L][s]
                occupied -= offloaded[s] * max(0.0, span[s] - (forward[s] + copied + input_grad[s]))
            if recomputed[s]:
                spared.append((n * redo[s], n * recomputed[s] * max(0.0, span[s] - (redo[s] + input_grad[s]))))
        weights += max(0.0, split - behind)  # the rest may run behind messages of experts
        head, tail = heads[held[0]], tails[held[0]]
        last = weight_grad[0] if held[0] else 0.0
        bound = max(bound, head + n * (passes + weights), head + n * passes + tail + last)
        if occupied:  # a rank without activation memory fits within any limit, even zero
            bound = max(bound, head + _least_with_recompute(n * (passes + weights), n * occupied, limits[rank], spared))
    return bound


def _least_with_recompute(work: float, occupied: float, limit: float, spared: list[tuple[float, float]]) -> float:
    """Returns the least time in which all passes can run and memory times time fits within the limit.

    Args:
        work: time of all passes except R.
        occupied: memory times time without recompute.
        limit: memory limit.
        spared: for each stage, the time to recompute all of it, and the part of ``occupied`` that this frees.
    """
    if limit <= 0:  # the parameters alone are too large
        return math.inf
    for time, less in sorted((pair for pair in spared if pair[1]), key=lambda pair: pair[0] / pair[1]):
        if work * limit >= occupied:
            break
        # Recompute as much of this stage as makes both bounds equal, at most all of it.
        part = min(1.0, (occupied - work * limit) / (time * limit + less))
        work, occupied = work + part * time, occupied - part * less
    return max(work, occupied / limit)
