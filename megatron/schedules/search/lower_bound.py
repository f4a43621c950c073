"""A lower bound on the makespan of any schedule within a memory limit, by argument rather than by search."""

from __future__ import annotations

from itertools import accumulate

from megatron.schedules.schedule.kinds import Kind, Share, stages_doing
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts


def lower_bound(placement: Placement, microbatches: int, costs: StageCosts, limit: float) -> float:
    """No schedule on ``placement`` that holds at most ``limit`` microbatches a rank ends sooner (same unit as costs).

    The largest of, for every rank,

    - its work, after the forwards that lead to it and before the input gradients that lead on from it;
    - its memory: each microbatch on a stage is held at least as long as its forward, all that comes after it, its
      input and its weight gradient take; these times times what is held must fit under the limit. What may be
      offloaded is away for all that time but for its own copies; what may be recomputed is, for so many microbatches
      as make work and memory press alike;

    and of the one chain of passes that a single microbatch is.
    """
    stages = range(placement.stages)
    rank_of, n = placement.rank_of, microbatches
    limits = costs.limits(placement, limit)

    def _there(stage: int, *kinds: Kind) -> float:
        """How long what is relieved is there all the same: in passes of ``kinds`` and in I."""
        return sum(costs.durations[kind][stage] for kind in (*kinds, Kind.I))

    again, away, redo = costs.held[Share.RECOMPUTED], costs.held[Share.OFFLOADED], costs.durations[Kind.R]
    forward, input_grad, weight_grad = (costs.durations[kind] for kind in (Kind.F, Kind.I, Kind.W))
    kept, left_to_w = costs.held[Share.FORWARD], costs.held[Share.WEIGHTS]
    # All ranks together do what is between the last stage's F and its I.
    shared, last_rank = costs.durations[Kind.S], rank_of[-1]
    parts = stages_doing(Kind.S, placement) if Kind.S in costs.times else []
    between = max((shared[s] + _there_and_back(costs, last_rank, rank_of[s]) for s in parts), default=0.0)
    # Of the message into s, and of that out of s back.
    into = [costs.latency(rank_of[s - 1], rank_of[s]) if s else 0.0 for s in stages]
    back = [costs.latency(rank_of[s], rank_of[s - 1]) if s else 0.0 for s in stages]
    # From the start of F of stage s to the end of its I.
    span = [0.0] * (placement.stages + 1)
    for s in reversed(stages):
        onward = span[s + 1] + (into[s + 1] + back[s + 1]) if s < placement.last_stage else between
        span[s] = forward[s] + onward + input_grad[s]
    # Up to the start of F of stage s, and from the end of its I on.
    heads = list(accumulate((forward[s] + into[s + 1] for s in stages[:-1]), initial=0.0))
    tails = list(accumulate((input_grad[s] + back[s + 1] for s in stages[:-1]), initial=0.0))
    bound = span[0] + min(weight_grad)
    for rank in range(placement.ranks):
        held = placement.stages_of(rank)
        first = held[0]
        head, tail = heads[first], tails[first]
        passes = n * sum(forward[s] + shared[s] + input_grad[s] for s in held)
        weights = n * sum(weight_grad[s] + costs.durations[Kind.T][s] for s in held)
        # A whole backward may keep less for its W than a split one, and the other way round.
        occupied = n * sum(
            (kept[s] + again[s] + away[s]) * span[s] + min(kept[s], left_to_w[s]) * weight_grad[s] for s in held
        )
        occupied -= n * sum(away[s] * max(0.0, span[s] - _there(s, Kind.F, Kind.O, Kind.L)) for s in held if away[s])
        last = weight_grad[0] if first else 0.0
        bound = max(bound, head + passes + weights, head + passes + tail + last)
        if occupied:  # what holds nothing goes under any limit, even none
            spared = [(n * redo[s], n * again[s] * max(0.0, span[s] - _there(s, Kind.R))) for s in held]
            bound = max(bound, head + _least_with_recompute(passes + weights, occupied, limits[rank], spared))
    return bound


def _there_and_back(costs: StageCosts, rank: int, other: int) -> float:
    return costs.latency(rank, other) + costs.latency(other, rank)


def _least_with_recompute(work: float, occupied: float, limit: float, spared: list[tuple[float, float]]) -> float:
    """The least time in which both the work can be done and what is held fits under the limit.

    Args:
        work: time of all passes but R.
        occupied: memory times time of all that is held where none is done again.
        limit: memory.
        spared: for each stage, how long doing all of its forwards again takes, and what of ``occupied`` that spares.
    """
    for time, less in sorted((each for each in spared if each[1]), key=lambda each: each[0] / each[1]):
        if work * limit >= occupied:
            break
        # Of this stage as much as brings both together, at most all.
        part = min(1.0, (occupied - work * limit) / (time * limit + less))
        work, occupied = work + part * time, occupied - part * less
    return max(work, occupied / limit)
