"""An output layer that all ranks share: where its passes stand, what they cost and hold, what they gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.planner.adaptive import bound
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import OF_RANKS, Kind, Pass, Share, stages_doing
from megatron.schedules.schedule.model_loads import EQUAL, Load, ModelLoads, Part
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.text_forms import from_csv, from_json, to_csv, to_json
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import NAMED
from tests.tiers import by_night

LAYER = Part(split=Load(1, 1, 1, 1))


def costs(layers: int = 32, output: float = 2.74, *, shared: bool = True) -> Costs:
    """An output layer that takes as long as so many layers, with a sixteenth of a microbatch for what it holds."""
    last = Part(whole=Load(output, output, output))
    model = ModelLoads(Part(), (LAYER,) * layers, last, kept_for_output=(layers / 128, 0), shared_vocabulary=shared)
    return Costs(LayerTimes(1, 1.1, 0.75), model, Link(0.05))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([*NAMED, "adaptive"]),
    d=st.integers(2, 6),
    n=st.integers(1, 14),
    output=st.floats(0.01, 40),
)
def test_every_schedule_has_them_and_ends(name: str, d: int, n: int, output: float):
    limit = {"memory_limit": 1.5, "search_seconds": 0.02} if name == "adaptive" else {}
    request = Request(name, d, n, costs(4 * d, output), **limit)
    schedule = plan(request)
    validate(schedule)
    on_stages = request.costs.on(schedule.placement)
    timeline = simulate(schedule, on_stages)
    start = dict(zip((w for _, w in schedule.passes()), (t for row in timeline.start for t in row), strict=True))
    end = dict(zip((w for _, w in schedule.passes()), (t for row in timeline.end for t in row), strict=True))
    last, rank_of = schedule.placement.last_stage, schedule.placement.rank_of
    for m in range(n):
        backward = Pass(last, Kind.I, m) if Pass(last, Kind.I, m) in start else Pass(last, Kind.B, m)
        for stage in stages_doing(Kind.S, schedule.placement):
            latency = 0.05 * (rank_of[stage] != rank_of[last])
            assert start[Pass(stage, Kind.S, m)] >= end[Pass(last, Kind.F, m)] + latency - 1e-9
            assert start[backward] >= end[Pass(stage, Kind.S, m)] + latency - 1e-9
            assert start[Pass(stage, Kind.T, m)] >= end[backward] + latency - 1e-9
    assert timeline.ideal == pytest.approx(n * 2 * 2.85 * (1 + output / (4 * d)))
    if name == "adaptive":
        assert timeline.makespan >= bound(request) - 1e-6
        assert timeline.peak <= 1.5 * d + 1e-6


@pytest.mark.parametrize("name", NAMED)
def test_it_takes_one_microbatch_more_and_little_longer_than_without_an_output_layer(name: str):
    plain, shared = Costs.of(1, 1.1, 0.75, 0.05), costs()
    without, with_it = (
        simulate(s, c.on(s.placement)) for c in (plain, shared) for s in [plan(Request(name, 8, 32, c))]
    )
    assert with_it.peak <= without.peak + 1.4
    # Its work, a part of the last stage's way there and back, and at most a tenth of what it may then idle more.
    assert with_it.makespan <= without.makespan * 1.1 + (with_it.ideal - without.ideal)


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        by_night(1.0, 203.3),
        by_night(0.625, 215.5),
        (0.5, 240),
    ],
)
def test_adaptive_comes_near_the_work_whatever_the_output_layer_weighs(limit: float, most: float):
    """Even layers with the output layer on the last stage take 308, 314 and 319; the work is 198."""
    shared = costs()
    schedule = plan(Request("adaptive", 8, 32, shared, memory_limit=limit))
    timeline = simulate(schedule, shared.on(schedule.placement))
    assert timeline.ideal == pytest.approx(198, abs=0.1)
    assert timeline.makespan <= most
    assert timeline.peak <= 8 * limit + 1e-6


@pytest.mark.parametrize("name", ["1f1b-v", "v-min", "v-half"])
def test_with_many_words_and_few_layers_ranks_hold_evenly_much(name: str):
    """One microbatch's S holds as much as three of a rank's layers: one more at a time on some ranks would show."""
    last = Part(whole=Load(100, 100, 100))
    model = ModelLoads(Part(), (LAYER,) * 8, last, kept_for_output=(6, 0), shared_vocabulary=True)
    for each in (Costs(), Costs.of(1, 1.1, 0.75, 0.05)):
        shared = replace(each, model=model)
        schedule = plan(Request(name, 4, 8, shared))
        peaks = simulate(schedule, shared.on(schedule.placement)).peaks
        assert max(peaks) <= 1.05 * sum(peaks) / 4


def test_its_costs_are_spread_over_the_ranks():
    on_stages = costs(8, 2.0).on(v_shape(2))
    # Two layers' worth between two ranks, half a rank's layers being two.
    assert on_stages.durations[Kind.S] == pytest.approx((0, 0, 1.05, 1.05))
    assert on_stages.durations[Kind.T] == pytest.approx((0, 0, 0.375, 0.375))
    assert on_stages.durations[Kind.I] == pytest.approx((1.1,) * 4)
    assert on_stages.held[Share.VOCABULARY] == pytest.approx((0, 0, 1 / 64, 1 / 64))
    assert on_stages.changes[Kind.S] == pytest.approx((0, 0, 1 / 64, 1 / 64))
    assert on_stages.changes[Kind.T] == pytest.approx((0, 0, -1 / 64, -1 / 64))


def test_text_forms_have_them():
    schedule = plan(Request("v-half", 4, 6, costs(16)))
    assert from_csv(to_csv(schedule)).order == schedule.order
    assert from_json(to_json(schedule)) == schedule
    again = plan(Request("file", 4, 6, costs(16), csv=to_csv(schedule)))
    assert again.order == schedule.order


def test_a_file_says_whether_the_vocabulary_is_shared():
    shared, not_shared = costs(16), costs(16, shared=False)
    for one, other in ((shared, not_shared), (not_shared, shared)):
        csv = to_csv(plan(Request("1f1b", 4, 6, one)))
        with pytest.raises(PlanError, match=r"the CSV has .*S and T.* share the vocabulary among all ranks"):
            plan(Request("file", 4, 6, other, csv=csv))


def by_hand(*rows: str) -> Schedule:
    return Schedule("by hand", sequential(2), 1, tuple(tuple(map(Pass.parse, row.split())) for row in rows))


FIRST, LAST = "0F0 0S0 0B0 0T0", "1F0 1S0 1B0 1T0"


def test_by_hand():
    validate(by_hand(FIRST, LAST))


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (("0F0 0B0 0T0", LAST), "0S0 is missing; every rank does S and T of every microbatch, or none does"),
        ((FIRST, "1F0 1S0 1B0"), "1T0 is missing"),
        (("0F0 0S0 0B0 0T0 0T0", LAST), "0T0 stands 2 times"),
        (("0F0 0T0 0S0 0B0", LAST), "0T0 stands before 0S0"),
        ((FIRST, "1F0 1B0 1S0 1T0"), "1B0 stands before 1S0"),
        ((FIRST, "1F0 1S0 1T0 1B0"), "1T0 stands before 1I0"),
        (("0F0 0B0 0S0 0T0", LAST), "rank 0 at 0B0, rank 1 at 1B0 wait for each other"),
    ],
)
def test_what_is_wrong_is_said(rows: tuple[str, str], error: str):
    with pytest.raises(PlanError, match=error):
        validate(by_hand(*rows))


def test_they_are_written_with_the_last_stage_of_their_rank():
    rows = ("0F0 3F0 0S0 3I0 3W0 0I0 0W0 0T0", "1F0 2F0 2S0 2I0 2W0 1I0 1W0 2T0")
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    with pytest.raises(PlanError, match="3S0 is missing"):
        validate(Schedule("by hand", v_shape(2), 1, order))


def test_it_takes_a_model():
    with pytest.raises(PlanError, match="share the vocabulary takes the model"):
        replace(EQUAL, shared_vocabulary=True)


def test_multi_token_prediction_uses_the_output_layer_too():
    ahead = replace(costs(), model=ModelLoads(Part(), (LAYER,) * 4, LAYER, shared_vocabulary=True))
    with pytest.raises(PlanError, match="multi-token prediction"):
        plan(Request("1f1b", 2, 2, ahead))


def test_nothing_of_it_is_planned_where_it_is_not_asked_for():
    schedule = plan(Request("v-zb", 4, 6, costs(16, shared=False)))
    assert not schedule.kinds & {*OF_RANKS}
