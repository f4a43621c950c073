"""Decisions depend on the proportions of costs, never on the unit that they are measured in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.schedules.planner.layer_partition import partition_layers
from megatron.schedules.planner.memory_saving import save_memory
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.placement import v_shape
from tests.tiers import of_which_by_day

# Eight layers alike, of which many partitions are equally good, and an output layer that takes as long as three.
LAYER, OUTPUT = Part(split=Load(10, 12, 8, 100)), Part(whole=Load(30, 36, 24, 100))
MODEL = ModelLoads(Part(), (LAYER,) * 8, OUTPUT)
COSTS = Costs(LayerTimes(1, 1.1, 0.75), link=Link(0.05), copies=HostCopies(0.7))


def scaled(costs: Costs, factor: float) -> Costs:
    """``costs`` in another unit, with those of the model's parts."""
    first, *layers, last = (
        Part(*(Load(*(factor * time for time in load[:3]), load.held) for load in part))
        for part in (costs.model.first, *costs.model.layers, costs.model.last)
    )
    model = replace(costs.model, first=first, layers=tuple(layers), last=last)
    return replace(costs.scaled(lambda time: factor * time), model=model)


NUMBER = st.integers(1, 9999)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    times=st.tuples(*[NUMBER] * 6), loads=st.tuples(*[NUMBER] * 6), shared=st.booleans(), exponent=st.floats(-12, 12)
)
def test_costs_in_any_unit_become_the_same_numbers(
    times: tuple[int, ...], loads: tuple[int, ...], shared: bool, exponent: float
):
    """Equal to the last digit, and so is everything that is decided from them."""
    *three, comm, copy, latency = times
    layer, output = Load(*loads[:3], 100), Load(*loads[3:], 10)
    model = ModelLoads(
        Part(), (Part(split=layer),) * 5, Part(whole=output), kept_for_output=(1, 2), shared_vocabulary=shared
    )
    costs = Costs(LayerTimes(*three), model, Link(comm, ((0, 1, latency),)), HostCopies(copy))
    one, other = (each.around_one() for each in (costs, scaled(costs, 10.0**exponent)))
    assert other.on(v_shape(2)) == one.on(v_shape(2))
    assert other.around_one() == other, "nothing is left to scale"
    assert one.link.latency / one.layers.forward == pytest.approx(comm / costs.layers.forward)


def decided(name: str, factor: float, how: dict[str, Any]) -> tuple[Any, ...]:
    """Order, placement, layers and shares of a small plan under costs in another unit."""
    costs = replace(COSTS, model=MODEL) if how.get("partition") else COSTS
    request = Request(name, 2, 4, scaled(costs, factor), **how)
    if request.partition:
        request = partition_layers(request)
        assert request.decisions.layers is not None
    if request.recompute or request.offload:
        request = save_memory(request)
    schedule = plan(request)
    return schedule.order, schedule.placement, request.decisions


SMALL: dict[str, Any] = {"memory_limit": 0.5, "search_seconds": 0.002}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("zb-1p", {}),
    ("v-half", {}),
    ("adaptive", SMALL),
    ("adaptive", SMALL | {"recompute": True}),
    ("adaptive", SMALL | {"offload": True}),
    ("1f1b", {"partition": True}),
    ("v-half", {"partition": True}),
    ("adaptive", SMALL | {"partition": True, "chunk_choices": (1, 2), "memory_limit": 0.75}),
]
BY_DAY = [("adaptive", SMALL), ("v-half", {"partition": True})]


@pytest.mark.parametrize(("name", "how"), of_which_by_day(ASKED, *BY_DAY), ids=str)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(exponent=st.floats(-20, 20))
@example(exponent=-20.0)
@example(exponent=20.0)
def test_no_decision_depends_on_the_unit_of_costs(name: str, how: dict[str, Any], exponent: float):
    assert decided(name, 10.0**exponent, how) == decided(name, 1.0, how)
