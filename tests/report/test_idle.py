"""Idle time, by phase and by whom a rank waits for: nothing is left out, and waits have the causes they have."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.report.idle import Cause, Phase, gaps, idle
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from tests.planner.made_schedules import costed_schedules, examples, timed, written
from tests.report.made import saved


def shaken(planned: Timeline, seed: int) -> Timeline:
    """As a run would go in which each rank comes late now and then, with its own clock, by eighths."""
    source, starts, ends = random.Random(seed), [], []
    for begun, over in zip(planned.start, planned.end, strict=True):
        late = list(accumulate(source.choice((0, 0, 0.125, 2.5)) for _ in (*begun, *over)))
        starts.append(tuple(a + b for a, b in zip(begun, late[::2], strict=True)))
        ends.append(tuple(a + b for a, b in zip(over, late[1::2], strict=True)))
    return replace(planned, start=tuple(starts), end=tuple(ends))


def assert_whole(each: Timeline) -> None:
    """Phases and causes of all gaps add up to the bubble; no wait is less than nothing."""
    found = idle(each)
    share = sum(rank.total for rank in found) / (each.schedule.ranks * each.makespan)
    assert share == pytest.approx(each.bubble, abs=1e-12)
    for rank, (own, spaces) in enumerate(zip(found, gaps(each), strict=True)):
        assert own.rank == rank
        assert own.total == pytest.approx(sum(own.phases.values()), abs=1e-12)
        assert own.total == pytest.approx(sum(own.causes.values()), abs=1e-9)
        for gap in spaces:
            assert sum(wait.time for wait in gap.waits) == pytest.approx(gap.end - gap.start, abs=1e-9)
            assert all(wait.time > 0 for wait in gap.waits)


@examples(150)
@given(costed_schedules(), st.integers(0, 10**6))
def test_phases_and_causes_add_up_to_the_bubble(made: tuple[Schedule, Costs], seed: int):
    schedule, costs = made
    planned = timed(schedule, costs)
    assert_whole(planned)
    assert_whole(shaken(planned, seed))


@examples(100)
@given(costed_schedules())
def test_in_a_plan_nobody_waits_for_a_host(made: tuple[Schedule, Costs]):
    for rank in idle(timed(*made)):
        assert rank.of(Cause.HOST) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("one_way", [False, True])
def test_copies_are_waited_for_too(one_way: bool):
    each = saved(one_way=one_way)
    assert_whole(each)
    assert sum(rank.of(Cause.COPY) for rank in idle(each)) > 0
    assert sum(rank.of(Cause.HOST) for rank in idle(each)) == pytest.approx(0, abs=1e-9)


def test_1f1b_by_hand():
    """Half a rank's layers take 1, 1, 1; its one chunk's F 2, its B 4. Rank 1 is the last of two."""
    each = timed(written(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), Costs(link=Link(0.5)))
    first, second = idle(each)
    # Rank 0 is free at 4; rank 1 has F0 2.5-4.5, B0 4.5-8.5, F1 8.5-10.5, B1 10.5-14.5. Then rank 0: B0 9-13, B1 15-19.
    assert first.phases == {Phase.WARM_UP: 5.0, Phase.STEADY: 0.0, Phase.COOL_DOWN: 2.0}
    assert first.causes == {(Cause.PASS, 1): 4.5 + 1.5, (Cause.MESSAGE, 1): 0.5 + 0.5}
    assert second.phases == {Phase.WARM_UP: 2.5, Phase.STEADY: 0.0, Phase.COOL_DOWN: 4.5}
    assert second.causes == {(Cause.PASS, 0): 2.0, (Cause.MESSAGE, 0): 0.5, (Cause.DONE, 1): 4.5}
    assert first.for_ranks == [(1, 7.0)]


def test_a_late_rank_is_named_by_who_waits_for_it():
    """Rank 1's first forward takes 3 longer; its own host is late once, before its last backward."""
    planned = timed(written(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    each = replace(planned, start=((0, 2, 11, 18), (2, 7, 11, 14)), end=((2, 4, 15, 22), (7, 11, 13, 18)))
    first, second = idle(each)
    assert first.causes == {(Cause.PASS, 1): 7 + 3}
    assert second.causes == {(Cause.PASS, 0): 2, (Cause.HOST, 1): 1, (Cause.DONE, 1): 4}
    assert_whole(each)


def test_without_backwards_warm_up_ends_with_the_first_pass():
    each = timed(written(sequential(2), 2, "0F0 0F1", "1F0 1F1"))
    assert idle(each)[1].phases == {Phase.WARM_UP: 2.0, Phase.STEADY: 0.0, Phase.COOL_DOWN: 0.0}
    assert idle(each)[0].phases == {Phase.WARM_UP: 0.0, Phase.STEADY: 0.0, Phase.COOL_DOWN: 2.0}


def test_an_output_layer_of_all_ranks_is_waited_for():
    part, layer = Part(), Part(split=Load(1, 1, 1, 1))
    model = ModelLoads(part, (layer,) * 16, Part(whole=Load(3, 3, 3)), kept_for_output=(0.1, 0), shared_vocabulary=True)
    request = Request("1f1b", 4, 1, Costs(LayerTimes(1, 1.1, 0.75), model, Link(0.05)))
    schedule = plan(request)
    each = simulate(schedule, request.costs.on(schedule.placement))
    assert_whole(each)
    needed = [gap.needed for row in gaps(each) for gap in row if gap.needed]
    assert Kind.S in {schedule.order[rank][index].kind for rank, index in needed}
    assert sum(rank.of(Cause.HOST) for rank in idle(each)) == pytest.approx(0, abs=1e-9)
