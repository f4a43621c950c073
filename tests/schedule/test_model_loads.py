"""What the parts of a model cost, and what that makes each stage cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part, even
from megatron.schedules.schedule.placement import sequential, v_shape, zigzag
from megatron.schedules.schedule.schedule import all_split
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.utils.errors import PlanError

LAYER = Part(split=Load(10, 12, 8, 100))
EMBEDDING = Part(whole=Load(1, 1, 0, 5))
OUTPUT = Part(whole=Load(20, 18, 16, 400))


def model(layers: int, first: Part = EMBEDDING, last: Part = OUTPUT) -> ModelLoads:
    return ModelLoads(first, (LAYER,) * layers, last)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("again", "memory"), [(0.0, MemoryShares()), (0.5, MemoryShares(0.75, kept=0.25))])
def test_layers_alone_spread_evenly_cost_what_equal_stages_do(chunks: int, again: float, memory: MemoryShares):
    times, placement = LayerTimes(1, 1.1, 0.75, stock_recompute=again), zigzag(4, chunks)
    costs = Costs(times, link=Link(0.05), memory=memory)
    alike, by_parts = costs.on(placement), replace(costs, model=model(16, Part(), Part())).on(placement)
    for kind in Kind:
        assert by_parts.durations[kind] == pytest.approx(alike.durations[kind])
        assert by_parts.changes[kind] == pytest.approx(alike.changes[kind])
    assert by_parts.least(placement) == pytest.approx(alike.least(placement))


def test_the_ends_come_on_top_and_leave_nothing_to_w():
    costs = Costs(LayerTimes(1, 1.2, 0.8), model(8)).on(v_shape(2))
    # Half a rank's layers are two; the output layer's forward is two layers', its backward 18 / 12 and 16 / 8 of them.
    assert costs.durations[Kind.F] == pytest.approx((1.05, 1, 1, 2))
    assert costs.durations[Kind.I] == pytest.approx((1.2 + 0.05, 1.2, 1.2, 1.2 + 0.9 + 0.8))
    assert costs.durations[Kind.W] == pytest.approx((0.8,) * 4)
    assert costs.activation == pytest.approx((0.5 + 5 / 400, 0.5, 0.5, 1.5))
    assert costs.held[Share.WEIGHTS] == pytest.approx([0.5] * 4)


def test_what_is_no_layer_recomputes_nothing():
    plain, again = (
        Costs(LayerTimes(stock_recompute=share), model(8), memory=MemoryShares(kept=1 - share / 2)).on(v_shape(2))
        for share in (0, 1)
    )
    more = [b - a for a, b in zip(plain.durations[Kind.I], again.durations[Kind.I], strict=True)]
    assert more == pytest.approx([1] * 4)
    assert again.held[Share.FORWARD] == pytest.approx([0.25 + 5 / 400, 0.25, 0.25, 0.25 + 1])


def test_layers_are_where_they_are_said_to_be():
    costs = Costs(model=model(8, Part(), Part())).on(sequential(4), Decisions(layers=(1, 3, 4, 0)))
    assert costs.durations[Kind.F] == pytest.approx((1, 3, 4, 0))
    with pytest.raises(PlanError, match="layers of 4 stages given for v"):
        Costs(model=model(8)).on(v_shape(4), Decisions(layers=(2, 2, 2, 2)))
    with pytest.raises(PlanError, match="the stages have 7 layers, and the model 8"):
        Costs(model=model(8)).on(v_shape(2), Decisions(layers=(2, 2, 2, 1)))


def test_an_end_may_stand_in_for_a_layer():
    counted = replace(model(14), stand_in=(1, 1))
    assert counted.evenly(8) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert counted.evenly(16) == (0, *(1,) * 14, 0)
    with pytest.raises(PlanError, match="14 layers are too few for 32 stages"):
        counted.evenly(32)


@given(st.integers(1, 200), st.integers(1, 130))
def test_even_stages_differ_by_a_layer_at_most(layers: int, stages: int):
    counts = even(layers, stages)
    assert sum(counts) == layers
    assert len(counts) == stages
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "file"])
@pytest.mark.parametrize(("d", "n", "layers"), [(4, 8, 16), (4, 9, 14), (3, 5, 4)])
def test_every_schedule_is_planned_for_a_model_with_ends(name: str, d: int, n: int, layers: int):
    """Also where some stages have no layer, whose W takes no time and holds nothing."""
    costs = Costs(LayerTimes(1, 1.1, 0.75), model(layers), link=Link(0.05))
    limit = {"memory_limit": 1.5, "search_seconds": 0.05} if name == "adaptive" else {}
    schedule = all_split(plan(Request(name, d, n, costs, **limit)))  # what is joined depends on the costs
    timeline = simulate(schedule, costs.on(schedule.placement))
    blind = simulate(schedule, Costs.of(1, 1.1, 0.75, 0.05).on(schedule.placement))
    assert timeline.makespan > blind.makespan


def test_a_model_without_layers_is_none():
    with pytest.raises(PlanError, match="one decoder layer or more"):
        ModelLoads(EMBEDDING, (), OUTPUT)
