"""The planner's service: whatever is asked for, one call makes the plan, and the plan says what it comes to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.schedules.planner.memory_saving import save_memory
from megatron.schedules.planner.plan_json import from_text
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from tests.tiers import by_night

LAYER = Part(split=Load(10, 12, 8, 100))
MODEL = ModelLoads(Part(), (LAYER,) * 10, Part(whole=Load(26, 31, 21, 100)))
COSTS = Costs(LayerTimes(1, 1.1, 0.75), MODEL, link=Link(0.05))
ADAPTIVE = Request("adaptive", 3, 6, COSTS, memory_limit=0.6, search_seconds=0.1, chunk_choices=(2,))


def planned(request: Request) -> tuple[Plan, list[float]]:
    told: list[float] = []
    return make_plan(request, told.append), told


@pytest.mark.parametrize(
    "request_",
    [
        Request("v-half", 4, 8),
        Request("zb-1p", 3, 6, COSTS, partition=True),
        by_night(replace(ADAPTIVE, partition=True)),
        by_night(replace(ADAPTIVE, recompute=True)),
        replace(ADAPTIVE, memory_limit=0.3, partition=True, recompute=True, offload=True),
    ],
    ids=["by name", "by name, layers", "layers", "recompute", "all"],
)
def test_a_plan_has_all_settled_that_was_to_be_searched(request_: Request):
    found, told = planned(request_)
    assert found.asked == request_
    assert not (found.request.partition or found.request.recompute or found.request.offload)
    assert (found.decisions.layers is not None) == request_.partition
    assert found.request.costs == request_.costs
    assert found.schedule == plan(found.request)
    assert found.timeline == simulate(found.schedule, found.costs)
    assert sum(told) == pytest.approx(1), "one progress for all parts"
    if request_.memory_limit is not None:
        assert found.peak_memory <= request_.memory_limit + 1e-9


def test_recompute_and_offload_are_searched_with_the_layers_that_were_settled():
    found = make_plan(replace(ADAPTIVE, memory_limit=0.35, partition=True, recompute=True))
    layers = replace(
        ADAPTIVE,
        memory_limit=0.35,
        recompute=True,
        decisions=replace(PLAIN, layers=found.decisions.layers),
        chunk_choices=found.request.chunk_choices,
    )
    assert found.decisions == save_memory(layers).decisions


def test_a_csv_says_itself_what_is_recomputed():
    csv = "0F0,0R0,0B0\n1F0,1B0\n"
    found = make_plan(Request("file", 2, 1, csv=csv))
    assert found.decisions.recomputed == (1.0, 0.0)
    assert found.timeline.recomputed > 0 and Kind.R in found.costs.times


def test_a_plan_says_what_it_comes_to():
    found = make_plan(Request("1f1b", 4, 8))
    assert (found.iteration_time, found.bubble, found.peak_memory) == (66, pytest.approx(3 / 11), 1)
    assert (found.peak_bytes, found.lower_bound) == (None, None)
    assert from_csv(found.to_csv()).order == found.schedule.order
    assert from_text(found.to_json()) == found.timeline


def test_an_adaptive_plan_says_what_no_other_is_shorter_than():
    found = make_plan(ADAPTIVE)
    assert found.lower_bound is not None and 0 < found.lower_bound <= found.iteration_time + 1e-9
    assert json.loads(found.to_json())["figures"]["lower_bound"] == found.lower_bound


def test_bytes_are_told_where_the_models_sizes_are_known():
    layers = (LayerMemory(100.0, 100.0, 90.0),) * 10
    memory = ModelMemory(layers, 6.0, EndMemory(), EndMemory())
    found = make_plan(Request("1f1b", 2, 4, replace(COSTS, memory=memory)))
    assert found.peak_bytes == pytest.approx(2 * 5 * 100)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(PlanError, match="too small for 3 ranks"):
        make_plan(replace(ADAPTIVE, memory_limit=0.01))
    with pytest.raises(PlanError, match="layers can be placed where the model is known"):
        make_plan(Request("v-half", 4, 8, partition=True))
