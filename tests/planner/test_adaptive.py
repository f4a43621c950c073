"""The adaptive search: sound, within its memory, no longer than what has a name, and as short as it is said to be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.adaptive import bound, chunk_choices, least_limit
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape, zigzag
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import NAMED, REAL, examples, recomputing, timed

# Schedules each order a few times: enough for what must hold however little is searched.
BRIEFLY = 0.02


def asked(ranks: int, microbatches: int, limit: float | None, costs: Costs | str = REAL, **more: Any) -> Request:
    given = Costs.parse(costs) if isinstance(costs, str) else costs
    request = Request("adaptive", ranks, microbatches, given, memory_limit=limit, search_seconds=BRIEFLY)
    return replace(request, **more)


def found(request: Request) -> Timeline:
    return timed(plan(request), request.costs)


def fitting(request: Request) -> list[Timeline]:
    """What has a name, as many chunks as may be, and no more memory than the request allows."""
    every = [timed(plan(replace(request, schedule=name)), request.costs) for name in NAMED]
    most = request.memory_limit * request.ranks + 1e-9 if request.memory_limit else 0
    return [one for one in every if one.peak <= most and one.schedule.placement.chunks in request.chunk_choices]


def check(request: Request) -> None:
    """Everything that is promised of an adaptive plan."""
    timeline = found(request)
    validate(timeline.schedule)
    assert request.memory_limit
    assert timeline.peak <= request.memory_limit * request.ranks + 1e-6
    assert timeline.makespan >= bound(request) - 1e-6
    for named in fitting(request):
        assert timeline.makespan <= named.makespan + 1e-6, named.schedule.name


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Costs up to three times one another, slices of the model that take or hold more, and any memory that works."""
    d = draw(st.integers(2, 6))
    n = draw(st.integers(1, 3 * d if d < 5 else d + 3))
    length = st.integers(4, 12).map(lambda quarters: quarters / 4)
    slices = st.lists(st.integers(0, 6).map(lambda halves: halves / 2), min_size=4 * d, max_size=4 * d).filter(any)
    by_slice = st.none() | slices
    latency = draw(st.sampled_from((0.0, 0.05, 1.0, 7.0)))
    times = draw(length), draw(length), draw(length)
    again = draw(recomputing())
    equal = replace(again, layers=LayerTimes(*times, stock_recompute=again.layers.stock_recompute), link=Link(latency))
    taken, held = draw(by_slice), draw(by_slice)
    costs = uneven(equal, taken or [1.0] * 4 * d, held) if taken or held else equal
    least = least_limit(asked(d, n, None, costs))
    return asked(d, n, max(least, 0.01) + draw(st.integers(0, 5 * d)) / (4 * d), costs)


@examples(40)
@given(requests())
def test_it_is_sound_within_its_memory_and_no_longer_than_what_has_a_name(request: Request):
    check(request)


@pytest.mark.nightly
@pytest.mark.parametrize(("d", "n", "limit"), [(8, 13, 0.4), (12, 17, 0.55), (24, 5, 0.2)])
def test_so_are_longer_pipelines_however_little_is_searched(d: int, n: int, limit: float):
    check(asked(d, n, limit, search_seconds=1e-3))


@pytest.mark.parametrize("limit", [2.0, 4.0, 6.0])
def test_a_named_schedule_wins_where_others_need_more_memory_or_more_messages(limit: float):
    """On one chunk a rank holds twice what it does on two; but messages are slow, and one chunk has a third of them."""
    costs = uneven(Costs.of(1, 1, 1, 7), (1.0,) * 8, (2.0,) * 4 + (0.0,) * 4)
    check(asked(2, 2, limit / 2, costs))
    check(asked(2, 3, limit / 2, costs))


@pytest.mark.parametrize("held", [0.0, 3.0])
def test_it_plans_where_activations_are_nothing_or_more_than_1f1b_holds(held: float):
    request = asked(2, 4, max(held, 1.0) / 2, Costs(memory=MemoryShares(held, kept=min(held, 1.0))))
    check(request)
    check(replace(request, memory_limit=5.0))


@pytest.mark.parametrize(
    "costs",
    [
        Costs.parse(REAL),
        uneven(Costs.of(1, 2, 0.5, 0.2), (1.5, *(1.0,) * 14, 1.8), (2.0, *(1.0,) * 15)),
    ],
    ids=["even", "uneven"],
)
def test_more_memory_never_costs_time(costs: Costs):
    least = least_limit(asked(4, 9, None, costs))
    requests = [asked(4, 9, limit, costs) for limit in (least, 0.35, 0.4, 0.5, 0.52, 0.625, 0.75, 1, 1.25, 2.5)]
    lengths = [found(request).makespan for request in requests]
    assert all(more <= less for less, more in pairwise(lengths))
    assert lengths[-1] < 0.8 * lengths[0], "and this much saves some"
    bounds = [bound(request) for request in requests]
    assert all(more <= less for less, more in pairwise(bounds))


def test_the_same_request_gives_the_same_plan():
    request = asked(4, 9, 0.6)
    assert plan(request) == plan(request)


def test_costs_in_another_unit_give_the_same_plan():
    unit = 2.0**-20
    costs = Costs.parse(REAL)
    small = costs.scaled(lambda time: unit * time)
    assert plan(asked(4, 9, 0.6, small)) == plan(asked(4, 9, 0.6, costs))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("d", "n", "costs", "bubble"), [(4, 8, REAL, 0.3803), (8, 16, "1,1.2,0.4,0.05", 0.3475)], ids=str
)
def test_the_default_search_reaches_the_shortest_plans_it_ever_found(d: int, n: int, costs: str, bubble: float):
    """With one seed alone it finds 0.3815 and 0.3545."""
    assert found(asked(d, n, 0.45, costs, search_seconds=None)).bubble < bubble


def test_progress_adds_up_to_the_whole():
    ticks: list[float] = []
    plan(asked(4, 8, 0.75), ticks.append)
    assert len(ticks) > 3
    assert sum(ticks) == pytest.approx(1)


# --- refused ------------------------------------------------------------------------------------------------------


def refused(request: Request) -> str:
    with pytest.raises(PlanError) as caught:
        plan(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("d", "n"), [(2, 1), (3, 4), (7, 9)])
@pytest.mark.parametrize("slices", [None, (1.0, 2.5, 0.7, 1.1)])
def test_too_small_a_limit_is_refused_with_the_smallest_that_works(d: int, n: int, slices: tuple[float, ...] | None):
    costs = Costs() if slices is None else uneven(Costs(), (1.0,) * 4 * d, slices * d)
    said = refused(asked(d, n, 0.01, costs))
    assert said.startswith(f"a memory limit of 0.01 of 1F1B's is too small for {d} ranks: ")
    smallest = float(said.split(": ")[1].removesuffix(" is the smallest that works"))
    check(asked(d, n, smallest, costs))
    refused(asked(d, n, smallest - 2e-4, costs))


def test_the_smallest_limit_may_be_rounded_a_little():
    """Written with nine digits 1/24 is a hair less than one microbatch of 24."""
    assert found(asked(24, 2, 0.041666666)).peak == 1


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit: float):
    assert "0.25 is the smallest that works" in refused(asked(4, 8, limit))


def test_there_must_be_a_limit():
    expected = "adaptive needs a memory limit: a fraction of 1F1B's activation memory, such as 0.5"
    assert refused(asked(4, 8, None)) == expected


@pytest.mark.parametrize("seconds", [0.0, -2.0, float("nan"), float("inf")])
def test_a_search_takes_time(seconds: float):
    expected = f"the search needs a positive number of seconds, not {seconds:g}"
    assert refused(asked(4, 8, 0.5, search_seconds=seconds)) == expected


@pytest.mark.parametrize("choices", [(), (0,), (-1,)])
def test_there_must_be_a_number_of_chunks(choices: tuple[int, ...]):
    expected = "adaptive needs a number of chunks a rank to choose from, 1 or more"
    assert refused(asked(4, 8, 0.5, chunk_choices=choices)) == expected


# --- placements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [sequential(4), v_shape(4), zigzag(4, 3), zigzag(4, 4)], ids=str)
def test_the_chunks_are_those_allowed(placement: Placement):
    assert plan(asked(4, 8, 0.6, chunk_choices=(placement.chunks,))).placement == placement


def test_what_has_a_name_but_other_chunks_is_no_answer():
    """A model's layers may not divide so; with one chunk a rank nothing comes near the best V."""
    request = asked(6, 12, 1.0, chunk_choices=(1,))
    assert plan(request).placement == sequential(6)
    assert timed(plan(replace(request, schedule="v-zb")), request.costs).makespan < bound(request)


def test_settled_layers_rule_out_chunks_they_do_not_go_with():
    request = asked(4, 8, 0.6, uneven(Costs(), (1.0,) * 8), decisions=Decisions(layers=(1,) * 8))
    timeline = found(request)
    assert timeline.schedule.placement == v_shape(4)
    assert timeline.peak <= 0.6 * 4 + 1e-9


@pytest.mark.parametrize(
    "placement", [sequential(4), interleaved(4, 2), v_shape(4), Placement("custom", (0, 1, 2, 3, 1, 0, 3, 2))], ids=str
)
def test_a_settled_placement_stays_whatever_the_microbatches(placement: Placement):
    """Model and optimizer are built for it before the number of microbatches changes."""
    for n in (1, 6):
        request = asked(4, n, 0.5, placement=placement)
        timeline = found(request)
        assert timeline.schedule.placement == placement
        assert timeline.peak <= 2
        assert timeline.makespan >= bound(request) - 1e-9


@pytest.mark.parametrize(
    ("most", "choices"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_chunks_up_to_a_number_are_powers_of_two_and_that_number(most: int, choices: tuple[int, ...]):
    assert chunk_choices(most) == choices
