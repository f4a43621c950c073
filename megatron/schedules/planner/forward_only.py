"""Forward-only schedules for evaluation. They keep the pipeline full, and need no memory limit.

With vocabulary parallelism each rank also computes its part of the output layer.
"""

from __future__ import annotations

import math

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import IN_EVALUATION, KINDS, Pass, everywhere
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import tasks_of


def forward_only(placement: Placement, microbatches: int, costs: Costs, decisions: Decisions = PLAIN) -> Schedule:
    """Schedule of all forwards. Each rank always runs the oldest microbatch that is ready."""
    kinds = [kind for kind in IN_EVALUATION if costs.model.shared_vocabulary or not KINDS[kind].of_ranks]
    works = [(stage, kind) for kind, stages in everywhere(placement, kinds).items() for stage in stages]
    rows = tuple(
        tuple(
            Pass(stage, kind, m)
            for m in range(microbatches)
            for stage, kind in works
            if placement.rank_of[stage] == rank
        )
        for rank in range(placement.ranks)
    )
    base = Schedule("forward-only", placement, microbatches, rows)
    tasks, passes = tasks_of(base, costs.on(placement, decisions))
    policy = Policy(lookahead=2 * placement.stages)
    limits = [math.inf] * placement.ranks
    order, _, _ = Rounds(tasks, compiled=False).settled(range(len(passes)), limits, policy)
    return Schedule(base.name, placement, microbatches, tasks.rows(order, passes))
