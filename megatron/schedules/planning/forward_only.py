"""Forward passes alone, for evaluation: no memory to mind, only the pipeline to keep full."""

from __future__ import annotations

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.list_scheduling import Policy
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.reorder import scheduled
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.tasks import tasks_of


def forward_only(placement: Placement, microbatches: int, costs: Costs) -> Schedule:
    """All forwards of ``microbatches`` on ``placement``, each rank always doing the oldest microbatch that is ready."""
    rows = tuple(
        tuple(Pass(stage, Kind.F, m) for m in range(microbatches) for stage in placement.stages_of(rank))
        for rank in range(placement.ranks)
    )
    base = Schedule("forward-only", placement, microbatches, rows)
    tasks, passes = tasks_of(base, costs.on(placement))
    policy = Policy(lookahead=2 * placement.stages)
    order, _ = scheduled(tasks, range(len(passes)), [float("inf")] * placement.ranks, policy)
    return Schedule(base.name, placement, microbatches, tasks.rows(order, passes))
