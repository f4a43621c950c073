"""What a job says of its plan."""

from __future__ import annotations

import pytest

from megatron.schedules.integration.flags.check import Planned
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.registry import Request, plan


def summary(request: Request) -> str:
    return Planner(Planned(request, plan(request))).summary()


def test_a_schedule_by_name_is_named():
    said = summary(Request("v-half", 4, 8))
    assert said == (
        "pipeline schedule v-half: 4 ranks, 8 microbatches, planned bubble 9.4 %, "
        "planned peak activation memory 75.0 % of 1F1B, beside 3 messages at most"
    )


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(0.5, "v-min"), (0.7, "adaptive")],
    ids=["one with a name", "one of its own"],
)
def test_of_adaptive_both_the_limit_and_what_was_chosen_are_named(limit: float, chosen: str):
    """Within half the memory of 1F1B nothing that is found in so little time is shorter than V-Min."""
    costs = Costs() if chosen == "v-min" else Costs(1, 1.1, 0.75, 0.05)
    request = Request("adaptive", 4, 8, costs, memory_limit=limit, search_seconds=0.001, chunk_choices=(2,))
    assert plan(request).name == chosen
    assert summary(request).startswith(
        f"pipeline schedule adaptive: {chosen}, within {limit} of 1F1B's memory: 4 ranks"
    )
