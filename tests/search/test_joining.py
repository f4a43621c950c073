"""Joining: whole backwards where no rank has a use for the split, at no cost in time, memory or order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.placement import interleaved, sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule, all_split
from megatron.schedules.schedule.simulator import peaks, whole_peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.joining import joined
from tests.planner.made_schedules import REAL, UNIT, costed_schedules, examples, planned, timed, written

LAYER = Part(split=Load(1, 1, 1, 1))


def rows_of(schedule: Schedule, costs: Costs | None = None) -> list[str]:
    """Rows of the schedule with what is joined under these costs, as text."""
    made = joined(schedule, (costs or Costs()).on(schedule.placement))
    return [" ".join(map(str, row)) for row in made.order]


def turns(schedule: Schedule, part: Kind) -> dict[int, list[int]]:
    """Microbatches of each stage, in the order in which its I or W, or the B in their place, adds gradients."""
    adds = [work for _, work in schedule.passes() if part in (work.kind, *KINDS[work.kind].parts)]
    return {stage: [work.microbatch for work in adds if work.stage == stage] for stage in {work.stage for work in adds}}


def splits(schedule: Schedule) -> int:
    return sum(work.kind is Kind.I for _, work in schedule.passes())


@examples(300)
@given(costed_schedules())
def test_joining_costs_neither_time_nor_memory_nor_the_order_of_gradients(made: tuple[Schedule, Costs]):
    """Whole backwards, and split ones, side by side: a user's schedule may have both."""
    schedule, costs = made
    on_stages = costs.on(schedule.placement)
    result = joined(schedule, on_stages)
    validate(result)
    assert timed(result, costs).makespan <= timed(schedule, costs).makespan + 1e-9
    for held in (peaks, whole_peaks):
        for now, before in zip(held(result, on_stages), held(schedule, on_stages), strict=True):
            assert now <= before + 1e-9
    for part in (Kind.I, Kind.W):
        assert turns(result, part) == turns(schedule, part)
    assert replace(result, order=()) == replace(schedule, order=())


@examples(200)
@given(costed_schedules())
def test_what_stays_split_next_to_its_w_is_waited_for_by_another_rank(made: tuple[Schedule, Costs]):
    """Unless experts' messages hide weight gradients, which a whole backward cannot do."""
    schedule, costs = made
    rank_of = schedule.placement.rank_of
    if not costs.on(schedule.placement).has_messages:
        for row in joined(schedule, costs.on(schedule.placement)).order:
            for work, following in pairwise(row):
                if work.kind is Kind.I and following == work._replace(kind=Kind.W) and work.microbatch != 1:
                    assert work.stage > 0 and rank_of[work.stage - 1] != rank_of[work.stage]


def test_the_first_stage_is_joined_and_one_that_is_waited_for_is_not():
    assert rows_of(written(sequential(2), 1, "0F0 0I0 0W0", "1F0 1I0 1W0")) == ["0F0 0B0", "1F0 1I0 1W0"]


def test_a_stage_is_joined_where_the_rank_that_waits_is_late_itself():
    """Rank 0 is busy with a heavy forward until both halves of stage 1's backward are done."""
    split = written(sequential(2), 2, "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    assert rows_of(split, uneven(Costs(), (9, 1)))[1].startswith("1F0 1B0")
    assert rows_of(split)[1].startswith("1F0 1I0 1W0")


@pytest.mark.parametrize(("heavier", "joins"), [(3.0, False), (3.5, False), (3.6, True)])
def test_a_delayed_message_still_arrives_a_while_ahead(heavier: float, joins: bool):
    """1B0 would end ``2 * heavier - 6`` before 0F1; a quarter of a mean weight gradient is ``(heavier + 1) / 4``."""
    split = written(sequential(2), 2, "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    row = rows_of(split, uneven(Costs(), (heavier, 1)))[1]
    assert row.startswith("1F0 1B0" if joins else "1F0 1I0 1W0")


def test_stages_keep_their_turns():
    """A B would add to the gradients of linears, or of norms, before its turn."""
    row = "0F0 0F2 0F1 0I0 0I2 0W2 0W0 0B1"
    assert rows_of(written(sequential(1), 3, row)) == ["0F0 0F2 0F1 0I0 0B2 0W0 0B1"]
    assert rows_of(written(sequential(1), 2, "0F0 0F1 0I0 0I1 0W0 0W1")) == ["0F0 0F1 0B0 0I1 0W1"]


def test_the_first_stages_b_stands_where_it_keeps_nobody_waiting():
    """The last stage's I is waited for; its W is not."""
    rows = "0F0 3F0 0F1 3I0 3W0 3F1 3I1 0I0 3W1 0W0 0I1 0W1", "1F0 2F0 1F1 2I0 1I0 2W0 1W0 2F1 2I1 1I1 2W1 1W1"
    first, _ = rows_of(written(v_shape(2), 2, *rows))
    assert first.endswith("0B0 3W1 0I1 0W1")
    hidden = Costs(LayerTimes(messages=(0.25, 0.25)))
    assert rows_of(written(v_shape(2), 2, *rows), hidden)[0] == rows[0], "what experts' messages hide stays hidden"


def test_where_memory_has_no_room_for_a_b_the_split_stays():
    """In the place of I it would keep rank 1 waiting for 0F1; in that of W, 0F1 would find no room."""
    rows = "0F0 0I0 0F1 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"
    split = written(sequential(2), 2, *rows)
    assert rows_of(split, replace(Costs(), memory=MemoryShares(weight_share=0.5)))[0] == "0F0 0I0 0F1 0W0 0I1 0W1"
    assert rows_of(split, replace(Costs(), memory=MemoryShares(weight_share=1.0)))[0] == "0F0 0F1 0B0 0I1 0W1"


def test_a_b_takes_no_more_than_what_comes_after_it_can_wait_for():
    """2I1 waits for rank 1 behind 0I0. Before it 0B0 would delay it, and after it would itself end later than 0W0."""
    rows = "0F0 0F1 2F0 2I0 2W0 2F1 0I0 2I1 2W1 0W0 0I1 0W1", "1F0 3F0 1F1 3I0 3W0 1I0 3F1 3I1 1W0 1I1 1W1 3W1"
    assert rows_of(written(interleaved(2, 2), 2, *rows), uneven(Costs(), (3, 3, 3, 1))) == list(rows)


def test_with_copies_in_the_background_a_b_begins_where_its_i_did():
    """Only then are the activations of 1I0 loaded back."""
    rows = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1O0 1L0 1I0 1W0 1F1 1I1 1W1"
    split = written(sequential(2), 2, *rows)
    costs = Costs(copies=HostCopies(1.0)).on(split.placement, Decisions(offloaded=(0.0, 1.0)))
    assert " ".join(map(str, joined(split, costs).order[1])) == rows[1]


def test_what_megatron_recomputes_in_a_b_counts():
    """The peak is in the first backward here."""
    split = written(sequential(1), 1, "0F0 0I0 0W0")
    costs = Costs().on(split.placement)
    for whole, kind in ((0.5, Kind.B), (0.6, Kind.I)):
        passing = {Kind.I: (0.5,), Kind.B: (whole,)}
        assert joined(split, replace(costs, passing=passing)).order[0][1].kind is kind


def test_collectives_of_vocabulary_parallelism_keep_their_order():
    row = "0F0 1F0 1S0 1I0 0I0 1T0 0W0 1W0"
    costs = replace(
        Costs(), model=ModelLoads(Part(), (LAYER, LAYER), Part(whole=Load(1, 1, 1, 0)), shared_vocabulary=True)
    )
    assert rows_of(written(v_shape(1), 1, row), costs) == [row]


def test_ranks_with_time_to_spare_are_joined_where_others_wait_for_them():
    """The last stage takes five times as long, so others need their messages late: times are moved there first."""
    model = ModelLoads(Part(), (LAYER,) * 8, Part(split=Load(4, 4, 4, 0)))
    late = plan(Request("v-zb", 4, 16, replace(Costs.of(1, 1.2, 0.5), model=model)))
    assert splits(late) < 0.25 * splits(all_split(late))


def test_link_latency_counts_for_those_who_wait_across_it():
    """In a V stage 2 hands its gradient to stage 1 on the same rank, and stage 3 to stage 2 on another."""
    rows = "0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 1W0"
    late = Costs(link=Link(5))
    assert rows_of(written(v_shape(2), 1, *rows), late) == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1I0 1W0"]


def test_a_b_comes_before_what_waits_for_it():
    assert rows_of(written(v_shape(1), 1, "0F0 1F0 1I0 0I0 1W0 0W0")) == ["0F0 1F0 1B0 0B0"]


@pytest.mark.parametrize("costs", [UNIT, REAL])
@pytest.mark.parametrize(
    ("ranks", "name"), [(d, name) for d in (4, 8) for name in ("zb-1p", "v-min", "v-half", "v-zb")]
)
def test_messages_that_take_longer_than_planned_cost_what_they_cost_a_schedule_that_splits_all(
    name: str, ranks: int, costs: str
):
    """A tenth of a forward longer. Where messages arrived just in time, this would cost up to four percent."""
    timeline = planned(name, ranks, 32, costs)
    planned_for = Costs.parse(costs)
    longer = replace(planned_for, link=Link(planned_for.link.latency + 0.05))
    assert timed(timeline.schedule, longer).makespan <= 1.002 * timed(all_split(timeline.schedule), longer).makespan


@pytest.mark.parametrize("name", ["zb-1p", "v-min", "v-half", "v-zb"])
def test_each_stage_keeps_a_split_that_a_job_can_measure(name: str):
    schedule = planned(name, 2, 8).schedule
    assert {(stage, kind) for _, (stage, kind, _) in schedule.passes()} >= {
        (stage, kind) for stage in range(schedule.placement.stages) for kind in (Kind.I, Kind.W)
    }


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_half_the_backwards_of_v_zb_need_no_split(ranks: int):
    assert splits(planned("v-zb", ranks, 4 * ranks).schedule) < 0.6 * 2 * ranks * 4 * ranks
