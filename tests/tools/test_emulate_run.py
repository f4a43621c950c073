"""A run of passes that sleep: the stage made slow is the one that the record shows."""

from __future__ import annotations

import pytest

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import Request
from megatron.schedules.planning.simulate import simulate
from megatron.schedules.report.idle import idle
from megatron.schedules.report.views import slowest_stage
from tools.emulate_run import emulated

REQUEST = Request("v-half", 2, 4, Costs(1, 1.25, 0.75))


@pytest.mark.full_matrix  # some seconds of starting processes
def test_the_stage_made_slow_shows_and_the_others_wait_for_its_rank():
    recorded = emulated(REQUEST, unit_ms=15, stage=1, factor=2)
    timeline = recorded.timeline
    slow = slowest_stage(timeline)
    assert (slow.stage, slow.rank) == (1, 1)
    assert slow.times_average == pytest.approx(2 * 4 / 5, rel=0.1)
    assert timeline.bubble > recorded.planned.bubble + 0.05
    first, second = idle(timeline)
    assert first.total > 2 * second.total and first.for_ranks[0][0] == 1
    # The simulator knows as much of what was made slow.
    assert simulate(timeline.schedule, timeline.costs).makespan == pytest.approx(timeline.makespan, rel=0.1)


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(PlanError, match="there are stages 0 to 3"):
        emulated(REQUEST, 1, stage=9)
