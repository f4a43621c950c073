"""Schedule ``auto``: the shortest plan within the memory limit, whatever it is called, and why it was chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import Request, every_named, plan
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import examples

REAL = Costs.of(1, 1.1, 0.75, 0.05)
LAYER = Part(split=Load(10, 12, 8, 100))
MODEL = replace(REAL, model=ModelLoads(Part(), (LAYER,) * 10, Part(whole=Load(26, 31, 21, 100))))
LITTLE = 0.02
"""Seconds of searching, so that many plans are made in a test's time: the promise does not need more."""


def assert_shortest(found: Plan, limit: float) -> None:
    """Within the limit, and no longer than any schedule by name that is."""
    ranks = found.schedule.ranks
    assert found.timeline.limit <= limit * ranks + 1e-6
    for chunks in (2, 3, 4):
        for named in every_named(replace(found.asked, chunks=chunks)):
            if named.limit <= limit * ranks:
                assert found.iteration_time <= named.makespan * (1 + 1e-9), named.schedule.name


@examples(10)
@given(
    ranks=st.integers(2, 4),
    rounds=st.sampled_from((0.4, 1, 1.5, 2)),
    times=st.tuples(*[st.integers(1, 12).map(lambda quarters: quarters / 4)] * 3),
    comm=st.sampled_from((0.0, 0.05, 1.0)),
    limit=st.sampled_from((0.5, 0.65, 0.8, 1.0, 1.5, 2.0)),
)
def test_no_schedule_by_name_that_fits_is_shorter(
    ranks: int, rounds: float, times: tuple[float, float, float], comm: float, limit: float
):
    microbatches = max(1, round(rounds * ranks))
    asked = Request("auto", ranks, microbatches, Costs.of(*times, comm), memory_limit=limit, search_seconds=LITTLE)
    assert_shortest(make_plan(asked), limit)


def test_without_a_limit_it_keeps_within_1f1bs_memory():
    found = make_plan(Request("auto", 4, 12, REAL, search_seconds=LITTLE))
    assert_shortest(found, 1.0)
    assert found.request.memory_limit == 1.0


def test_layers_are_searched_where_the_model_is_known():
    asked = Request("auto", 3, 6, MODEL, memory_limit=0.8, search_seconds=LITTLE, chunk_choices=(1, 2), partition=True)
    found = make_plan(asked)
    assert_shortest(found, 0.8)
    assert found.decisions.layers is not None and sum(found.decisions.layers) == 10
    assert f"layers by stage {','.join(map(str, found.decisions.layers))}" in found.explanation


def test_layers_that_are_settled_stay():
    layers = Decisions(layers=(4, 3, 3))
    asked = Request("auto", 3, 6, MODEL, search_seconds=LITTLE, chunk_choices=(1,), decisions=layers)
    assert make_plan(asked).decisions == layers


def test_nothing_is_recomputed_but_where_it_is_allowed_and_gains():
    asked = Request("auto", 3, 6, REAL, memory_limit=0.25, search_seconds=LITTLE, chunk_choices=(2,))
    with pytest.raises(PlanError, match="is the smallest that works"):
        make_plan(asked)
    found = make_plan(replace(asked, recompute=True))
    assert found.decisions.recomputed is not None and found.peak_memory <= 0.25 + 1e-9
    assert re.search(r"\d % of the layers recomputed", found.explanation)
    plenty = make_plan(replace(asked, recompute=True, memory_limit=2.0))
    assert plenty.decisions.recomputed is None


@pytest.mark.parametrize("limit", [0.3, 0.4])
def test_with_recompute_it_is_never_longer_than_with_even_layers(limit: float):
    """The best layers without recompute need not be the best with it."""
    model = replace(REAL, model=ModelLoads(Part(), (LAYER,) * 12, Part(whole=Load(26, 31, 21, 100))))
    even = Request(
        "adaptive", 3, 6, model, memory_limit=limit, search_seconds=LITTLE, chunk_choices=(2,), recompute=True
    )
    asked = replace(even, schedule="auto", partition=True)
    found = make_plan(asked)
    assert found.asked == asked
    assert found.iteration_time <= make_plan(even).iteration_time * (1 + 1e-9)
    assert found.decisions.layers is not None


def test_a_plan_says_in_a_few_lines_why_it_was_chosen():
    found = make_plan(Request("auto", 4, 8, REAL, memory_limit=0.7, search_seconds=LITTLE))
    lines = found.explanation.splitlines()
    assert 2 <= len(lines) <= 5
    assert lines[0] == f"Schedule: {found.schedule.name} with {found.schedule.placement.chunks} chunks a rank."
    base = make_plan(Request("1f1b", 4, 8, REAL))
    shorter = 100 * (1 - found.iteration_time / base.iteration_time)
    assert "within the limit of 70.0 %" in found.explanation
    assert f"the iteration is {shorter:.1f} % shorter than 1F1B's" in found.explanation
    assert "The shortest schedule by name within the limit is v-min" in found.explanation


def test_a_plan_that_is_made_again_from_its_settled_request_says_so_too():
    """As a job does whose plan holds more messages than it left memory for."""
    heavy = replace(REAL, model=ModelLoads(Part(), (LAYER,) * 12, Part(whole=Load(60, 70, 50, 100))))
    asked = Request("auto", 3, 9, heavy, memory_limit=1.0, search_seconds=LITTLE, chunk_choices=(1, 2), partition=True)
    found = make_plan(asked)
    assert found.request.start is not None, "the search for the partition found it"
    again = make_plan(found.request)
    assert again.iteration_time <= found.iteration_time * (1 + 1e-9)
    assert again.explanation.splitlines()[0] == found.explanation.splitlines()[0]


def test_it_says_what_vocabulary_parallelism_would_gain_where_that_is_a_bottleneck():
    heavy = replace(REAL, model=ModelLoads(Part(), (LAYER,) * 12, Part(whole=Load(60, 70, 50, 100))))
    asked = Request("auto", 3, 9, heavy, memory_limit=1.0, search_seconds=LITTLE, chunk_choices=(1, 2))
    found = make_plan(asked)
    shared = make_plan(replace(asked, costs=replace(heavy, model=replace(heavy.model, shared_vocabulary=True))))
    said = re.search(r"vocabulary parallelism would make the iteration some (\d+) % shorter", found.explanation)
    assert said is not None
    assert int(said[1]) == pytest.approx(100 * (1 - shared.iteration_time / found.iteration_time), abs=2)
    assert int(said[1]) > 10
    light = replace(REAL, model=ModelLoads(Part(), (LAYER,) * 12, Part()))
    for other in (shared, make_plan(replace(asked, costs=light)), make_plan(replace(asked, costs=REAL))):
        assert "vocabulary" not in other.explanation


def test_layers_that_fit_no_other_number_of_stages_are_explained_too():
    layers = Decisions(layers=(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0))
    asked = Request("auto", 3, 4, MODEL, search_seconds=LITTLE, chunk_choices=(4,), decisions=layers)
    assert make_plan(asked).explanation.startswith("Schedule: adaptive with 4 chunks a rank, layers by stage 1,1,")


def test_auto_is_not_planned_as_a_schedule_of_its_own():
    with pytest.raises(PlanError, match="the planner's service"):
        plan(Request("auto", 4, 8))
