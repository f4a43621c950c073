"""Forward passes alone, for evaluation: no memory to mind, only the pipeline to keep full.

Where all ranks share the vocabulary, each has its part of the output layer to do as well.
"""

from __future__ import annotations

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.reorder import scheduled
from megatron.schedules.search.tasks import tasks_of


def forward_only(placement: Placement, microbatches: int, costs: Costs, decisions: Decisions = PLAIN) -> Schedule:
    """All forwards of ``microbatches`` on ``placement``, each rank always doing the oldest microbatch that is ready."""
    of_each = [[Pass(stage, Kind.F, 0) for stage in placement.stages_of(rank)] for rank in range(placement.ranks)]
    if costs.shared_vocabulary:
        for works in of_each:
            works.append(works[-1]._replace(kind=Kind.S))
    rows = tuple(tuple(work._replace(microbatch=m) for m in range(microbatches) for work in works) for works in of_each)
    base = Schedule("forward-only", placement, microbatches, rows)
    tasks, passes = tasks_of(base, costs.on(placement, decisions))
    policy = Policy(lookahead=2 * placement.stages)
    order, _ = scheduled(tasks, range(len(passes)), [float("inf")] * placement.ranks, policy)
    return Schedule(base.name, placement, microbatches, tasks.rows(order, passes))
