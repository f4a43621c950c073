"""Costs: what is read, what is refused, and that every placement does the same work at the same costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import EQUAL
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from megatron.schedules.schedule.placement import interleaved, sequential, v_shape, zigzag
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import decode, encode
from tests.planner.made_schedules import examples

TIME = st.floats(1e-6, 1e6)


def refused(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Costs.parse(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,1,1", Costs.of(1, 1, 1, 0)),
        ("1,1.1,0.75,0.05", Costs.of(1, 1.1, 0.75, 0.05)),
        ("1,1.1,0.75,0.05,0.2", Costs(LayerTimes(1, 1.1, 0.75, (0.2, 0.2)), link=Link(0.05))),
        (" 2 , 3e1,.5 , 0", Costs.of(2, 30, 0.5, 0)),
    ],
)
def test_costs_are_three_to_five_numbers(text: str, expected: Costs):
    assert Costs.parse(text) == expected


@examples(100)
@given(TIME, TIME, TIME, TIME)
def test_written_costs_read_back(forward: float, backward: float, weight: float, latency: float):
    assert Costs.parse(f"{forward!r},{backward!r},{weight!r},{latency!r}") == Costs.of(
        forward, backward, weight, latency
    )


@pytest.mark.parametrize("text", ["", "1", "1,1", "1,1,1,0,0,0", "a,b,c", "1;1;1", "1,1,1,", "1,,1", "1 1 1"])
def test_another_form_is_refused_with_an_example(text: str):
    assert refused(text) == (
        f"costs are F,I,W[,LATENCY[,MESSAGES]], three to five numbers such as 1,1.1,0.75,0.05, not {text!r}"
    )


@pytest.mark.parametrize("text", ["0,1,1", "1,-1,1", "1,1,nan", "inf,1,1"])
def test_a_pass_must_take_time(text: str):
    assert refused(text) == f"costs F,I,W must be positive numbers, not {text}"


@pytest.mark.parametrize("latency", ["-1", "nan", "inf"])
def test_a_latency_may_be_zero_but_not_negative(latency: str):
    assert refused(f"1,1,1,{latency}") == f"the P2P latency must be zero or a positive number, not {latency}"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda: LayerTimes(stock_recompute=1.5), "the share of the forward that is recomputed must be from 0 to 1"),
        (lambda: LayerTimes(recompute_time=0), "the time of a recompute pass must be a positive number, not 0"),
        (lambda: MemoryShares(weight_share=101), "the share of memory held until W must be from 0 to 100, not 101"),
        (lambda: MemoryShares(kept=-1), "the share of memory kept for recomputing must be from 0 to 1, not -1"),
        (lambda: MemoryShares(layer_input=math.nan), "the share of memory that is a layer's input must be from 0 to 1"),
        (lambda: HostCopies(-1), "the time of a copy must be zero or a positive number, not -1"),
        (lambda: Link(pairs=((0, 1, math.inf),)), "the P2P latency must be zero or a positive number, not inf"),
        (lambda: Costs(memory=ModelMemory((), 0, EndMemory(), EndMemory())), "the bytes of layers need their number"),
    ],
)
def test_each_part_refuses_what_is_no_time_and_no_share(part: Callable[[], object], expected: str):
    with pytest.raises(PlanError, match=expected):
        part()


def test_costs_without_a_model_are_those_of_equal_layers_of_any_number():
    costs = Costs.parse("1,1.1,0.75,0.05")
    for placement in (sequential(3), v_shape(4), zigzag(2, 3)):
        layers = replace(EQUAL, layers=EQUAL.layers * placement.stages, divisible=False)
        assert costs.on(placement) == replace(costs, model=layers).on(placement)
        assert costs.layers_on(placement) is None, "their number is unknown"


@examples(100)
@given(TIME, TIME, TIME, st.integers(1, 16), st.integers(1, 5))
def test_every_placement_does_the_same_work(forward: float, backward: float, weight: float, ranks: int, chunks: int):
    costs = Costs.of(forward, backward, weight, 0.5)
    for placement in (sequential(ranks), v_shape(ranks), interleaved(ranks, chunks), zigzag(ranks, chunks)):
        on_stages = costs.on(placement)
        for rank in range(ranks):
            stages = placement.stages_of(rank)
            split = sum(on_stages.durations[kind][stage] for stage in stages for kind in (Kind.F, Kind.I, Kind.W))
            whole = sum(on_stages.durations[kind][stage] for stage in stages for kind in (Kind.F, Kind.B))
            assert split == pytest.approx(2 * (forward + backward + weight))
            assert whole == pytest.approx(split)
            assert sum(on_stages.activation[stage] for stage in stages) == pytest.approx(1)
        assert on_stages.comm == 0.5, "a message carries the same activations whatever the chunks"


def test_a_stage_costs_what_its_layers_cost():
    costs = uneven(Costs.of(1, 2, 3), (1, 1, 1, 2.5), (0.5, 1, 1, 4)).on(v_shape(2))
    assert costs.durations[Kind.F] == pytest.approx((1, 1, 1, 2.5))
    assert costs.durations[Kind.I] == pytest.approx((2, 2, 2, 5))
    assert costs.durations[Kind.W] == pytest.approx((3, 3, 3, 7.5))
    assert costs.durations[Kind.B][3] == pytest.approx(12.5)
    average = (0.5 + 1 + 1 + 4) / 4
    assert costs.activation == pytest.approx([each / average for each in (0.25, 0.5, 0.5, 2)])


def test_one_list_of_layers_serves_every_number_of_chunks():
    layers = (1.0, 2.0, 3.0, 6.0, 1.0, 1.0, 0.0, 2.0)
    costs = uneven(Costs(), layers, layers)
    assert costs.on(zigzag(2, 4)).durations[Kind.F] == pytest.approx([x / 2 for x in layers])
    assert costs.on(v_shape(2)).durations[Kind.F] == pytest.approx((1.5, 4.5, 1, 1))
    assert costs.on(sequential(2)).durations[Kind.F] == pytest.approx((6, 2))
    assert costs.on(sequential(2)).activation == pytest.approx((1.5, 0.5)), "relative to the average rank"


@pytest.mark.parametrize(
    "memory", [MemoryShares(0.5, 0.75), ModelMemory((LayerMemory(4, 2, 1),), 1, EndMemory(), EndMemory())]
)
def test_costs_are_the_same_after_they_were_sent(memory: MemoryShares | ModelMemory):
    """The first rank sends all others the request of its plan, as JSON."""
    costs = replace(uneven(Costs.of(1, 1.1, 0.75, 0.05), (1.0,)), memory=memory)
    assert decode(encode(costs), Costs) == costs
