"""An iteration in a few numbers: as planned, and the same where it ran as planned."""

from __future__ import annotations

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.measure.iteration_summary import (
    Iteration,
    iteration_of,
    measured_iteration,
    rank_times,
)
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.simulator import Timeline, simulate

LAYER = Part(split=Load(1, 1, 1, 1))
SHARED = Costs(model=ModelLoads(Part(), (LAYER,) * 8, Part(whole=Load(2, 2, 2, 1)), shared_vocabulary=True))
SLOW = uneven(Costs(), (1, 1, 2, 1))


def timeline(costs: Costs) -> Timeline:
    schedule = plan(Request("zb-1p", 4, 8, costs))
    return simulate(schedule, costs.on(schedule.placement))


def as_it_ran(planned: Timeline, replicas: int = 1) -> Iteration:
    schedule = planned.schedule
    ranks = [
        rank_times(list(zip(row, start, end, strict=True)), schedule.placement.stages)
        for row, start, end in zip(schedule.order, planned.start, planned.end, strict=True)
    ] * replicas
    return measured_iteration(
        sum(rank.busy for rank in ranks),
        len(ranks),
        max(rank.until_last for rank in ranks),
        [max(times) for times in zip(*(rank.stages for rank in ranks), strict=True)],
    )


@pytest.mark.parametrize("costs", [Costs.of(2, 3, 1, 0.5), SLOW, SHARED])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_runs_as_planned_comes_to_what_was_planned(costs: Costs, replicas: int) -> None:
    planned = timeline(costs)
    assert iteration_of(planned).bubble == planned.bubble > 0
    found = as_it_ran(planned, replicas)
    assert found.bubble == pytest.approx(planned.bubble)
    assert found.stages == pytest.approx(iteration_of(planned).stages)


def test_the_slowest_stage_is_held_against_the_mean() -> None:
    stage, beyond = iteration_of(timeline(SLOW)).slowest
    assert (stage, beyond) == (2, pytest.approx(2 / 1.25 - 1))


def test_the_output_layer_of_all_ranks_is_no_stages() -> None:
    planned = timeline(SHARED)
    assert {Kind.S, Kind.T} <= planned.schedule.kinds
    assert iteration_of(planned).slowest.beyond_mean == pytest.approx(0)


def test_a_job_that_has_computed_nothing_has_no_bubble() -> None:
    assert measured_iteration(0.0, 4, 0.0, [0.0, 0.0]) == Iteration(0.0, (0.0, 0.0))
    assert Iteration(0.0, (0.0, 0.0)).slowest == (0, 0.0)
