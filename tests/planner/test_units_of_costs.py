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
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part

# Eight layers alike, of which many partitions are equally good, and an output layer that takes as long as three.
LAYER, OUTPUT = Part(split=Load(10, 12, 8, 100)), Part(whole=Load(30, 36, 24, 100))
MODEL = ModelLoads(Part(), (LAYER,) * 8, OUTPUT)
COSTS = Costs(1, 1.1, 0.75, 0.05, copy=0.7)


def scaled(costs: Costs, factor: float) -> Costs:
    """``costs`` in another unit."""
    times = {
        field: factor * getattr(costs, field) for field in ("forward", "input_grad", "weight_grad", "comm", "copy")
    }
    return replace(costs, **times)


def decided(name: str, factor: float, how: dict[str, Any]) -> tuple[Any, ...]:
    """Order, placement, layers and shares of a small plan under costs in another unit."""
    request = Request(name, 2, 4, scaled(COSTS, factor), **how)
    if request.partition:
        request = partition_layers(replace(request, costs=replace(request.costs, model=MODEL)))
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
]


@pytest.mark.parametrize(("name", "how"), ASKED, ids=str)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(exponent=st.floats(-20, 20))
@example(exponent=-20.0)
@example(exponent=20.0)
def test_no_decision_depends_on_the_unit_of_costs(name: str, how: dict[str, Any], exponent: float):
    assert decided(name, 10.0**exponent, how) == decided(name, 1.0, how)


PARTITIONS: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"partition": True}),
    ("v-half", {"partition": True}),
    ("adaptive", SMALL | {"partition": True, "chunk_choices": (1, 2), "memory_limit": 0.75}),
]


@pytest.mark.parametrize(("name", "how"), PARTITIONS, ids=str)
@pytest.mark.parametrize("exponent", [-66, -1, 66])
def test_no_layer_partition_depends_on_a_unit_that_rounds_nothing(name: str, how: dict[str, Any], exponent: int):
    """Any other unit rounds costs otherwise, and of equally good partitions the last digit of a sum decides."""
    assert decided(name, 2.0**exponent, how) == decided(name, 1.0, how)
