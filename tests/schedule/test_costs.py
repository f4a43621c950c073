"""Costs: what is read, what is refused, and that every placement does the same work at the same costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import interleaved, sequential, v_shape, zigzag
from megatron.schedules.utils.errors import PlanError
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
        ("1,1,1", Costs(1, 1, 1, 0)),
        ("1,1.1,0.75,0.05", Costs(1, 1.1, 0.75, 0.05)),
        ("1,1.1,0.75,0.05,0.2", Costs(1, 1.1, 0.75, 0.05, messages=(0.2, 0.2))),
        (" 2 , 3e1,.5 , 0", Costs(2, 30, 0.5, 0)),
    ],
)
def test_costs_are_three_to_five_numbers(text: str, expected: Costs):
    assert Costs.parse(text) == expected


@examples(100)
@given(TIME, TIME, TIME, TIME)
def test_written_costs_read_back(forward: float, backward: float, weight: float, latency: float):
    assert Costs.parse(f"{forward!r},{backward!r},{weight!r},{latency!r}") == Costs(forward, backward, weight, latency)


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


@pytest.mark.parametrize("field", ["stage_weights", "stage_activations"])
@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_stage_weights_must_be_numbers(field: str, number: float):
    with pytest.raises(PlanError, match="per-stage weights must be zero or positive numbers"):
        Costs(**{field: (1.0, number)})


@examples(100)
@given(TIME, TIME, TIME, st.integers(1, 16), st.integers(1, 5))
def test_every_placement_does_the_same_work(forward: float, backward: float, weight: float, ranks: int, chunks: int):
    costs = Costs(forward, backward, weight, 0.5)
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


def test_a_stage_costs_what_its_weight_says():
    costs = Costs(1, 2, 3, 0, stage_weights=(1, 1, 1, 2.5), stage_activations=(0.5, 1, 1, 4)).on(v_shape(2))
    assert costs.durations[Kind.F] == (1, 1, 1, 2.5)
    assert costs.durations[Kind.I] == (2, 2, 2, 5)
    assert costs.durations[Kind.W] == (3, 3, 3, 7.5)
    assert costs.durations[Kind.B][3] == 12.5
    assert costs.activation == (0.25, 0.5, 0.5, 2)


def test_a_stage_of_several_slices_costs_their_mean():
    """One list, finer than any stage, serves every number of chunks."""
    slices = (1.0, 2.0, 3.0, 6.0, 1.0, 1.0, 0.0, 2.0)
    costs = Costs(1, 1, 1, 0, stage_weights=slices, stage_activations=slices)
    assert costs.on(zigzag(2, 4)).durations[Kind.F] == tuple(x / 2 for x in slices)
    assert costs.on(v_shape(2)).durations[Kind.F] == (1.5, 4.5, 1, 1)
    assert costs.on(sequential(2)).durations[Kind.F] == (6, 2)
    assert costs.on(sequential(2)).activation == (3, 1)


@pytest.mark.parametrize("field", ["stage_weights", "stage_activations"])
def test_there_must_be_a_weight_for_every_stage(field: str):
    with pytest.raises(PlanError) as caught:
        Costs(**{field: (1.0, 1.0, 2.0)}).on(v_shape(4))
    what = field.removeprefix("stage_")
    assert str(caught.value) == f"3 stage {what} given for v (4 ranks x 2 chunks), which has 8 stages"
