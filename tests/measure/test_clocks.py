"""Ranks' own clocks become one: a simulated iteration told by clocks set anyhow comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.measure.clocks import aligned, gaps, latencies, shifts
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, Times, simulate
from tests.planner.made_schedules import NAMED, examples, schedules

TIMES = st.floats(0.25, 4)
LATENCY = st.integers(0, 8).map(lambda eighths: eighths / 8)
OFFSETS = st.lists(st.floats(-1e4, 1e4), min_size=8, max_size=8)


def told(timeline: Timeline, offsets: list[float]) -> tuple[Times, Times]:
    """Starts and ends as each rank's own clock has them."""
    rows = zip(timeline.start, timeline.end, offsets, strict=False)
    moved = [[tuple(time + offset for time in each) for each in (start, end)] for start, end, offset in rows]
    return tuple(each[0] for each in moved), tuple(each[1] for each in moved)


def waits(schedule: Schedule, start: Times, end: Times) -> float:
    """The least time between the end of a pass and the start of one on another rank that waits for it."""
    return min(gaps(schedule, start, end).values())


@examples(30)
@given(st.sampled_from(NAMED), st.integers(2, 5), st.integers(1, 9), TIMES, TIMES, TIMES, LATENCY, OFFSETS)
def test_a_plan_comes_back_as_it_was_where_messages_wait_for_nothing_else(name, d, n, f, i, w, latency, offsets):
    schedule = plan(Request(name, d, n))
    timeline = simulate(schedule, Costs.of(f, i, w, latency).on(schedule.placement))
    found = aligned(schedule, *told(timeline, offsets))
    assert waits(schedule, found.start, found.end) >= -1e-9
    true = gaps(schedule, timeline.start, timeline.end)
    if all(gap == pytest.approx(latency, abs=1e-9) for gap in true.values()):
        expected, links = timeline.start, set(true)
        assert [pytest.approx(row, abs=1e-7) for row in expected] == list(found.start)
        measured = latencies([gaps(schedule, *told(timeline, offsets))])
        assert measured.keys() == links and all(each == pytest.approx(latency, abs=1e-7) for each in measured.values())


@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "v-half", "v-zb", "interleaved-1f1b"])
def test_the_usual_plans_have_messages_that_wait_for_nothing_else(name):
    schedule = plan(Request(name, 4, 16, Costs.of(1, 1.25, 0.75, 0.25)))
    timeline = simulate(schedule, Costs.of(1, 1.25, 0.75, 0.25).on(schedule.placement))
    found = aligned(schedule, *told(timeline, [300.0, -7.5, 11.0, 0.125]))
    assert [pytest.approx(row) for row in timeline.start] == list(found.start)


@examples(100)
@given(schedules(), TIMES, TIMES, LATENCY, OFFSETS)
def test_nothing_begins_before_what_it_waits_for_has_ended(schedule, f, i, latency, offsets):
    """Sensible or not, on any placement; and the first pass of all begins at 0."""
    timeline = simulate(schedule, Costs.of(f, i, 1, latency).on(schedule.placement))
    found = aligned(schedule, *told(timeline, offsets))
    between = gaps(schedule, found.start, found.end)
    assert all(gap >= -1e-7 for gap in between.values())
    assert min(row[0] for row in found.start) == pytest.approx(0, abs=1e-9)


def test_a_guess_is_mended_where_a_circle_of_ranks_shows_it_wrong():
    """Rank 2 is known to be late by way of rank 1 only; its own messages with rank 0 had always to wait."""
    found = {(0, 1): 10.0, (1, 0): -8.0, (1, 2): 1.0, (2, 1): 1.0, (0, 2): 50.0, (2, 0): -8.5}
    shift = shifts(3, found)
    assert shift == (0.0, -9.0, -9.0)
    skewed = shifts(3, found | {(2, 0): -9.5, (0, 2): 10.0})
    assert all(skewed[b] - skewed[a] + gap >= 0 for (a, b), gap in (found | {(2, 0): -9.5, (0, 2): 10.0}).items())


def test_link_latency_is_the_median_of_iterations_and_never_below_zero():
    rounds = [{(0, 1): 5.0 + more, (1, 0): -4.0 + more} for more in (0.0, 0.5, 2.0)]
    assert latencies(rounds) == {(0, 1): 1.0, (1, 0): 1.0}
    assert latencies([{(0, 1): 1.0, (1, 0): -1.5, (1, 2): 3.0}]) == {(0, 1): 0.0, (1, 0): 0.0}
