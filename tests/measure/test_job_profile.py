"""A job's own profile: on the placement that was measured it says what was measured, elsewhere what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.job_profile_json import from_text, to_text
from megatron.schedules.measure.measured_passes import Conditions, RankMeasured, profile_of, rank_measured
from megatron.schedules.measure.profile_facts import CopyRates, Facts
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import MOST_SHARE, LayerTimes, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import SEEN_BY, Kind, Share
from megatron.schedules.schedule.placement import Placement, sequential, v_shape
from megatron.schedules.schedule.simulator import held_over_time, simulate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import examples

MS = st.floats(0.01, 100)


def alike(time: float) -> Measured:
    return Measured(time, time, time)


def stage(layers: int, f: float, i: float, w: float, held: float = 1000.0, **more: Any) -> StageProfile:
    times = {Kind.F: alike(f), Kind.I: alike(i), Kind.W: alike(w)}
    return StageProfile(
        layers, times, held=held, sizes=sizes({Share.WEIGHTS: 0.75 * held, **more.pop("sizes", {})}), **more
    )


def sizes(seen: dict[Share, float]) -> dict[Share, float]:
    return dict.fromkeys(SEEN_BY, 0.0) | seen


def profile(placement: Placement, *stages: StageProfile, **more: Any) -> JobProfile:
    facts = Facts("a GPU", sum(each.layers for each in stages), 64, 4, 128, 1, 1, vocabulary=512, dtype="bf16")
    return JobProfile(facts, "v-half", placement, 8, (3, 5), 1, stages, **more)


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 4), MS, MS, MS, MS), min_size=2, max_size=8))
def test_stages_that_were_measured_have_the_times_that_were_measured(measured):
    found = profile(sequential(len(measured)), *(stage(*each) for each in measured))
    costs = found.costs(len(measured)).on(found.placement, Decisions(layers=found.layers))
    for at, kind in enumerate((Kind.F, Kind.I, Kind.W), start=1):
        assert costs.times[kind] == pytest.approx([each[at] for each in measured])
    held = [each[4] for each in measured]
    assert costs.activation == pytest.approx(
        [len(held) * each / found.model.mean.held / sum(found.layers) for each in held]
    )


def test_an_end_that_holds_far_more_than_its_layers_is_planned_for():
    found = profile(sequential(2), stage(4, 1, 1, 1, held=1.0), stage(4, 1, 1, 1, held=5000.0))
    assert found.costs(2).memory.weight_share == MOST_SHARE


V = [stage(2, 2.5, 2.75, 1.6, 1200.0), *[stage(2, 2.0, 2.4, 1.6)] * 6, stage(2, 5.0, 8.4, 1.6, 3000.0)]


def test_what_the_ends_take_beyond_their_layers_is_embedding_and_output_layer():
    loads = profile(v_shape(4), *V).model
    assert [each.split[:3] for each in loads.layers] == [pytest.approx((1.0, 1.2, 0.8))] * 16
    assert loads.first.whole == pytest.approx((0.5, 0.175, 0.175, 200.0))
    assert loads.last.whole == pytest.approx((3.0, 3.0, 3.0, 2000.0))


def test_another_pipeline_has_its_own_share_of_the_same_layers():
    """Two ranks of one chunk, with eight layers each."""
    costs = profile(v_shape(4), *V).costs(2).on(sequential(2))
    assert costs.times[Kind.F] == pytest.approx((8.5, 11.0))
    assert costs.times[Kind.I] == pytest.approx((9.95, 15.6))
    assert costs.times[Kind.W] == pytest.approx((6.4, 6.4))


def test_link_latencies_are_those_measured_where_there_are_as_many_ranks():
    latencies = ((0, 1, 0.1), (1, 0, 0.1), (1, 2, 0.7), (2, 1, 0.7), (2, 3, 0.2), (3, 2, 0.2))
    found = profile(v_shape(4), *V, latencies=latencies)
    same, other = (found.costs(ranks).on(v_shape(ranks)) for ranks in (4, 2))
    assert (same.latency(1, 2), same.latency(0, 3), other.latency(0, 1)) == (0.7, 0.2, 0.2)


def test_an_output_layer_that_all_ranks_share_is_what_they_took_for_it():
    parts = {Kind.S: alike(1.5), Kind.T: alike(0.75)}
    stages = [
        replace(each, times={**each.times, **(parts if at > 3 else {})}) for at, each in enumerate(V[:7] + V[1:2])
    ]
    found = profile(
        v_shape(4),
        *(replace(each, sizes={**each.sizes, Share.VOCABULARY: 100.0 * (Kind.S in each.times)}) for each in stages),
    )
    shared = replace(found.costs(4), model=replace(found.model, shared_vocabulary=True)).on(v_shape(4))
    assert shared.times[Kind.S] == pytest.approx((0, 0, 0, 0, 1.5, 1.5, 1.5, 1.5))
    assert shared.times[Kind.T] == pytest.approx((0, 0, 0, 0, 0.75, 0.75, 0.75, 0.75))
    assert shared.times[Kind.F] == pytest.approx([each.median(Kind.F) for each in stages])
    alone = found.costs(4).on(v_shape(4))
    assert alone.times[Kind.F][-1] == pytest.approx(2.0 + 3.0)
    assert alone.times[Kind.I][-1] == pytest.approx(2.4 + 3.0 + 3.0)


def test_forwards_done_again_and_copies_are_as_they_were_measured():
    more = {"recomputed": 0.5, "sizes": {Share.RECOMPUTED: 470.0}}
    again = [replace(stage(2, 2.0, 2.4, 1.6, **more), times=V[1].times | {Kind.R: alike(1.2)}) for _ in range(8)]
    found = profile(v_shape(4), *again, copy_gbps=CopyRates(2e-3, 1e-3, 1e-3))
    costs = found.costs(4).on(v_shape(4), Decisions(recomputed=(0.5,) * 8))
    assert costs.times[Kind.R] == pytest.approx((1.2,) * 8)
    assert found.costs(4).in_shares.layer_input == pytest.approx(1 - 470 / 500)
    assert found.copy_time(4) == pytest.approx(1.0), "1000 bytes at a megabyte a second"


def test_it_is_read_as_it_was_written(tmp_path: Path):
    times = {**V[0].times, Kind.B: Measured(4.0, 3.5, 9.0)}
    made = profile(
        v_shape(4),
        replace(V[0], times=times, recomputed=0.25),
        *V[1:],
        latencies=((0, 1, 0.5),),
        copy_gbps=CopyRates(5, 4, 3),
    )
    path = tmp_path / "costs.json"
    path.write_text(to_text(made, date="today"))
    assert read_profile(path) == made


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": []}, r"\$.stages must have 8 values, one for each stage of the placement, not 0"),
        ({"placement": {}}, "lacks 'name'"),
        ({"latencies": [[0, 1, -1]]}, r"\$.latencies\[0\]\[2\] must be a number >= 0.0, not -1"),
        ({"version": 4}, "version 4, and 2 is read here"),
        ({"model": {"layers": 3}}, "lacks 'hidden_size'"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], why: str):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(json.loads(to_text(profile(v_shape(4), *V))) | change))
    with pytest.raises(PlanError, match=why) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"passes": {"F": {"median": 1, "low": 1, "high": 1}}}, r"\$.stages\[3\].passes lacks 'I'"),
        ({"layers": -1}, r"\$.stages\[3\].layers must be a whole number >= 0, not -1"),
        ({"activation_bytes": -5}, r"\$.stages\[3\].activation_bytes must be a number >= 0.0, not -5"),
        ({"recomputed": 2}, r"\$.stages\[3\].recomputed must be a number <= 1.0, not 2"),
    ],
)
def test_a_stage_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], why: str):
    data = json.loads(to_text(profile(v_shape(4), *V)))
    data["stages"][3] |= change
    (tmp_path / "costs.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=why):
        read_profile(tmp_path / "costs.json")


def rows(costs: Costs, schedule_name: str, slower: float = 1.0) -> tuple[list[RankMeasured], Conditions]:
    """What ranks say of a simulated iteration; with a second replica of rank 1 that takes ``slower`` times as long."""
    schedule = plan(Request(schedule_name, 2, 4, costs))
    timeline = simulate(schedule, costs.on(schedule.placement))
    found = []
    for rank, pace in ((0, 1.0), (0, 1.0), (1, 1.0), (1, slower)):
        order, changes = schedule.order[rank], costs.on(schedule.placement).changes_of(schedule.order[rank])
        passes = [
            (work, pace * start, pace * end)
            for work, start, end in zip(order, timeline.start[rank], timeline.end[rank], strict=True)
        ]
        counted = list(zip(order, (1000 * change for change in changes), strict=True))
        found.append(rank_measured(rank, passes, [], counted, {(0, 1): pace}))
    facts = Facts("a GPU", 8, 64, 4, 128, 1, 1)
    return found, Conditions(facts, schedule, costs, Decisions(), (3, 5))


def test_a_stage_takes_as_long_as_on_its_slowest_replica():
    found, under = rows(Costs(LayerTimes(2, 2.5, 1.5), memory=MemoryShares(0.5)), "zb-1p", slower=3.0)
    made = profile_of(found, under)
    assert made == profile_of(found[::-1], under), "the same on all ranks"
    assert made.replicas == 2 and made.layers == (4, 4)
    assert [each.median(Kind.F) for each in made.stages] == pytest.approx([4.0, 12.0])
    assert astuple(made.stages[1].times[Kind.I]) == pytest.approx((15.0, 5.0, 15.0))
    assert (made.stages[1].held, made.stages[1].sizes[Share.WEIGHTS]) == pytest.approx((1000.0, 500.0))
    assert made.latencies == ((0, 1, 3.0),)


def test_a_profile_tells_messages_from_the_passes_that_contain_them_and_exposed_from_hidden_ones():
    schedule = plan(Request("v-zb", 2, 4))
    found = []
    for rank, order in enumerate(schedule.order):
        took = {Kind.F: 5.0, Kind.I: 6.0, Kind.B: 9.0, Kind.W: 3.0}
        waits = [(work, 2.0 if work.kind is Kind.F else 1.0) for work in order if work.kind is not Kind.W]
        passes = [(work, 0.0, took[work.kind]) for work in order]
        found.append(rank_measured(rank, passes, [], [], {}, waits, exposed=0.25 * sum(time for _, time in waits)))
    facts = Facts("a GPU", 8, 64, 4, 128, 1, 1)
    made = profile_of(found, Conditions(facts, schedule, Costs(), Decisions(), (3, 5)))
    assert made.exposed == pytest.approx(0.25)
    assert all(each.messages == {Kind.F: 2.0, Kind.I: 1.0} for each in made.stages)
    costs = made.costs(2)
    # Two stages a rank, as half a rank's layers each.
    assert (*costs.layers.passes[:2], *costs.layers.messages) == pytest.approx((5.0, 6.0, 2.0, 1.0))
    on_stages = made.stage_costs(Costs(), Decisions())
    assert on_stages.messages == {Kind.F: (2.0,) * 4, Kind.I: (1.0,) * 4}
    assert from_text(to_text(made)) == made
    plain = replace(made, stages=tuple(replace(each, messages={}) for each in made.stages), exposed=None)
    assert plain.costs(2).layers.messages == (0.0, 0.0) and plain.stage_costs(Costs(), Decisions()).messages == {}
    assert "messages" not in to_text(plain) and from_text(to_text(plain)) == plain
    assert from_text(to_text(replace(made, exposed=None))).exposed is None


def test_the_size_of_what_is_kept_is_that_of_the_pass_that_moves_nothing_else():
    works = {Kind.F: 900.0, Kind.I: -400.0, Kind.W: -500.0, Kind.S: 60.0, Kind.T: -60.0, Kind.R: 200.0}
    works |= {Kind.O: -300.0, Kind.L: 300.0}
    found = [
        RankMeasured(
            rank,
            {(rank, kind): alike(1.0) for kind in works},
            {(rank, kind): part * change for kind, change in works.items()},
            {rank: part * 1100.0},
            {},
        )
        for rank in (0, 1)
        for part in (0.5, 1.0)
    ]
    facts = Facts("a GPU", 8, 64, 4, 128, 1, 1)
    for stage in profile_of(found, Conditions(facts, plan(Request("1f1b", 2, 2)), Costs(), Decisions(), (3, 5))).stages:
        assert stage.sizes == {Share.WEIGHTS: 500, Share.VOCABULARY: 60, Share.RECOMPUTED: 200, Share.OFFLOADED: 300}


def test_the_file_names_the_sizes_as_ever():
    """Files of version 2 stay readable."""
    seen = {Share.WEIGHTS: 1.0, Share.VOCABULARY: 2.0, Share.RECOMPUTED: 3.0, Share.OFFLOADED: 4.0}
    assert seen.keys() == SEEN_BY.keys()
    written = json.loads(to_text(profile(v_shape(4), *(replace(each, sizes=seen) for each in V))))
    assert written["version"] == 2
    sizes = {name: size for name, size in written["stages"][0].items() if name.endswith("_bytes")}
    assert sizes == {
        "activation_bytes": 1200, "weight_bytes": 1, "vocabulary_bytes": 2, "recompute_bytes": 3, "offload_bytes": 4
    }  # fmt: skip


def test_a_backward_that_was_always_whole_is_halved_as_planned():
    found, under = rows(Costs.of(2, 2.5, 1.5), "1f1b")
    made = profile_of(found, under).stages[0]
    assert made.halved and made.median(Kind.B) == pytest.approx(8.0)
    assert (made.median(Kind.I), made.median(Kind.W)) == pytest.approx((5.0, 3.0))


def test_what_is_held_follows_the_passes():
    start, end = (1.0, 3.0, 4.0), (2.0, 4.0, 5.0)  # of F, I and W
    assert held_over_time((100.0, -25.0, -75.0), start, end) == ((0.0, 0.0), (1.0, 100.0), (4.0, 75.0), (5.0, 0.0))


def test_the_price_of_a_split_backward_is_measured_where_both_ran():
    placement = sequential(2)
    split = [stage(2, 10.0, 11.0, 9.0) for _ in range(2)]
    assert profile(placement, *split).costs(2).layers.splitting == 0
    both = replace(split[0], times={**split[0].times, Kind.B: Measured(18.0, 18.0, 18.0)})
    costs = profile(placement, both, split[1]).costs(2)
    assert costs.layers.splitting == pytest.approx((costs.layers.input_grad + costs.layers.weight_grad) / 10)
    on = costs.on(placement).durations
    assert on[Kind.B][1] == pytest.approx(0.9 * (on[Kind.I][1] + on[Kind.W][1]))
