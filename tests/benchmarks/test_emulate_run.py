"""A run of passes that sleep: the stage made slow is the one that the record shows."""

from __future__ import annotations

import pytest

from benchmarks.emulate_run import cured, emulated, slowed
from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.report.idle import idle
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.utils.errors import PlanError

REQUEST = Request("v-half", 2, 4, Costs.of(1, 1.25, 0.75))


@pytest.mark.nightly  # some seconds of starting processes
def test_the_stage_made_slow_shows_and_the_others_wait_for_its_rank():
    true = slowed(REQUEST, stage=1, factor=2)
    recorded = emulated(REQUEST, true, unit_ms=15)
    timeline = recorded.timeline
    slow = iteration_of(timeline).slowest
    assert (slow.stage, timeline.schedule.placement.rank_of[slow.stage]) == (1, 1)
    assert 1 + slow.beyond_mean == pytest.approx(2 * 4 / 5, rel=0.1)
    assert timeline.bubble > recorded.planned.bubble + 0.05
    first, second = idle(timeline)
    assert first.total > 2 * second.total and first.for_ranks[0][0] == 1
    # The simulator knows as much of what was made slow.
    assert simulate(timeline.schedule, timeline.costs).makespan == pytest.approx(timeline.makespan, rel=0.1)
    # And so does a plan for what was measured, whose layers are elsewhere: it is shorter in truth, not only planned so.
    better = cured(REQUEST, recorded, layers=True)
    again = emulated(better, true, unit_ms=15)
    assert again.timeline.makespan < 0.95 * timeline.makespan


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(PlanError, match="there are stages 0 to 3"):
        slowed(REQUEST, stage=9, factor=2)


def test_layers_are_placed_for_what_was_measured():
    """A plan for the times of a run in which stage 1 took twice as long is shorter under the true ones."""
    schedule, costs = plan(REQUEST), slowed(REQUEST, 1, 2)
    planned, true = (simulate(schedule, each.on(schedule.placement)) for each in (REQUEST.costs, costs))
    better = cured(REQUEST, Recorded(true, planned, 1, "simulated"), layers=True)
    found = plan(better)
    cure = simulate(found, costs.on(found.placement, better.decisions))
    assert cure.makespan < 0.95 * true.makespan
