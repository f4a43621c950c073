"""Polishing: what is handed out keeps the limit, is no longer than its base, and splits only what pays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.schedule.cost_parts import Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.polish import many_plans, merge_backward, polish
from tests.planner.made_schedules import costed_schedules, examples, timed, written

Starts = dict[Pass, float]


def starts_of(timeline: Timeline) -> Starts:
    rows = zip(timeline.schedule.order, timeline.start, strict=True)
    return {work: at for row, times in rows for work, at in zip(row, times, strict=True)}


@examples(100)
@given(costed_schedules(), st.sampled_from((0.0, 1.0, 2.5, 100.0)))
def test_a_polished_order_is_sound_no_longer_and_within_its_limit(made: tuple[Schedule, Costs], limit: float):
    schedule, costs = made
    on_stages = costs.on(schedule.placement)
    around_one = costs.around_one().on(schedule.placement)
    polished = polish(schedule, around_one, limit)
    validate(polished)
    assert timed(polished, costs).makespan <= timed(schedule, costs).makespan + 1e-9
    for held, own in zip(peaks(polished, on_stages), peaks(schedule, on_stages), strict=True):
        assert held <= max(limit, own) + 1e-9
    assert polish(schedule, around_one, limit) == polished, "the same every time"


@examples(40)
@given(costed_schedules())
def test_among_many_plans_each_is_as_if_made_alone(made: tuple[Schedule, Costs]):
    """Those of one order under other times share what does not depend on times."""
    schedule, costs = made
    layers = costs.layers
    slower = replace(costs, layers=replace(layers, forward=2 * layers.forward, weight_grad=layers.weight_grad / 2))
    later = replace(costs, link=replace(costs.link, latency=costs.link.latency + 0.5))
    on_stages = [each.around_one().on(schedule.placement) for each in (costs, slower, later, costs)]
    with many_plans(math.inf):
        together = [polish(schedule, each, 2.5) for each in on_stages]
    assert together == [polish(schedule, each, 2.5) for each in on_stages]


@examples(200)
@given(costed_schedules())
def test_joining_moves_nothing_in_time(made: tuple[Schedule, Costs]):
    """Whole backwards, and split ones, side by side: a user's schedule may have both."""
    schedule, costs = made
    timeline = timed(schedule, costs)
    merged = merge_backward(timeline)
    validate(merged)
    before, after = starts_of(timeline), starts_of(timed(merged, costs))
    for work, start in after.items():
        twin = work if work in before else Pass(work.stage, Kind.I, work.microbatch)
        assert start == pytest.approx(before[twin])
    assert timed(merged, costs).makespan == pytest.approx(timeline.makespan)
    assert merged.microbatches == schedule.microbatches and merged.placement == schedule.placement


@examples(200)
@given(costed_schedules())
def test_what_stays_split_next_to_its_w_has_someone_waiting(made: tuple[Schedule, Costs]):
    schedule, costs = made
    merged = merge_backward(timed(schedule, costs))
    timeline = timed(merged, costs)
    starts, rank_of = starts_of(timeline), schedule.placement.rank_of
    for row, ends in zip(merged.order, timeline.end, strict=True):
        for first, second, end in zip(row, row[1:], ends[1:], strict=False):
            stage, kind, m = first
            if kind is Kind.I and second == Pass(stage, Kind.W, m):
                assert stage > 0, "nobody waits for the first stage"
                waits = next(starts[w] for k in (Kind.I, Kind.B) if (w := Pass(stage - 1, k, m)) in starts)
                latency = costs.link.latency if rank_of[stage - 1] != rank_of[stage] else 0
                assert waits < end + latency


def test_the_first_stage_is_joined_and_one_that_is_waited_for_is_not():
    merged = merge_backward(timed(written(sequential(2), 1, "0F0 0I0 0W0", "1F0 1I0 1W0")))
    assert [" ".join(map(str, row)) for row in merged.order] == ["0F0 0B0", "1F0 1I0 1W0"]


def test_a_stage_is_joined_where_the_rank_that_waits_is_late_itself():
    """Rank 0 is busy with a heavy forward until both halves of stage 1's backward are done."""
    split = written(sequential(2), 2, "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
    late = uneven(Costs(), (9, 1))
    assert str(merge_backward(timed(split, late)).order[1][1]) == "1B0"
    assert str(merge_backward(timed(split)).order[1][1]) == "1I0"


def test_what_does_not_stand_together_is_not_joined():
    merged = merge_backward(timed(written(sequential(1), 2, "0F0 0F1 0I0 0I1 0W0 0W1")))
    assert merged.order == written(sequential(1), 2, "0F0 0F1 0I0 0I1 0W0 0W1").order


def test_link_latency_counts_for_those_who_wait_across_it():
    """In a V stage 2 hands its gradient to stage 1 on the same rank, and stage 3 to stage 2 on another."""
    rows = "0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 1W0"
    merged = merge_backward(timed(written(v_shape(2), 1, *rows), Costs(link=Link(5))))
    assert [" ".join(map(str, row)) for row in merged.order] == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1I0 1W0"]
