"""Each way of not being a schedule is refused in one line that names it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import examples, schedules, written


def refused(schedule: Schedule) -> str:
    with pytest.raises(PlanError) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(schedule: Schedule, rank: int, row: tuple[Pass, ...]) -> Schedule:
    return replace(schedule, order=(*schedule.order[:rank], row, *schedule.order[rank + 1 :]))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0I0 0W0 0B1 0F1", "0F0 is missing"),
        ("0F0 0F1 0B0", "0B1 (or 0I1 and 0W1) is missing"),
        ("0F0 0I0 0F1 0B1", "0W0 is missing"),
        ("0F0 0W0 0F1 0B1", "0I0 is missing"),
        ("0F0 0F1 0B0 0B1 0B0", "0B0 stands 2 times; every pass is done once"),
        ("0F0 0F0 0B0 0F1 0B1", "0F0 stands 2 times; every pass is done once"),
        ("0F0 0B0 0W0 0F1 0B1", "stage 0, microbatch 0 has a whole backward B and an I or W too"),
        ("0F0 0I0 0B0 0F1 0B1", "stage 0, microbatch 0 has a whole backward B and an I or W too"),
        ("0F0 0W0 0I0 0F1 0B1", "0W0 stands before 0I0, which it needs"),
        ("0B0 0F0 0F1 0B1", "0B0 stands before 0F0, which it needs"),
        ("0I0 0W0 0F0 0F1 0B1", "0I0 stands before 0F0, which it needs"),
        ("0F0 0F1 0B0 0B1 1F0", "1F0 on rank 0: stage 1 is on rank 1"),
        ("0F0 0F1 0B0 0B1 2F0", "2F0 on rank 0: there are only 2 stages"),
        ("0F0 0F1 0B0 0B1 0F2 0B2", "0F2 on rank 0: there are only 2 microbatches"),
    ],
)
def test_what_is_wrong_is_named(row: str, expected: str):
    assert refused(written(sequential(2), 2, row, "1F0 1F1 1B0 1B1")) == f"written: {expected}"


def test_whole_and_split_backwards_may_be_mixed():
    validate(written(sequential(2), 2, "0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1"))


def test_there_is_one_row_for_each_rank():
    assert refused(written(sequential(3), 1, "0F0 0B0", "1F0 1B0")) == "written: 2 rows for 3 ranks"
    assert refused(written(sequential(1), 1, "0F0 0B0", "")) == "written: 2 rows for 1 rank"


@pytest.mark.parametrize("microbatches", [0, -1])
def test_there_is_at_least_one_microbatch(microbatches: int):
    assert refused(written(sequential(1), microbatches, "")) == (
        f"written: {microbatches} microbatches; at least 1 is needed"
    )


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (-1, 1), (1, -1)])
@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_numbered_below_zero(stage: int, microbatch: int, first: bool):
    """Python would take a negative number for a place counted from the end."""
    schedule = written(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    stray, row = (Pass(stage, Kind.F, microbatch), Pass(stage, Kind.B, microbatch)), schedule.order[1]
    assert f"{stray[0]} on rank 1" in refused(changed(schedule, 1, stray + row if first else row + stray))


def test_ranks_must_not_wait_for_each_other():
    message = refused(written(sequential(2), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert message == "written: the order cannot finish: rank 0 at 0B0, rank 1 at 1F1 wait for each other"
    assert "rank 1 at 1F0" in refused(written(v_shape(2), 1, "3F0 0F0 3B0 0B0", "1F0 2F0 2B0 1B0"))


# --- any schedule, broken anywhere --------------------------------------------------------------------------------


def _anywhere(data: st.DataObject) -> tuple[Schedule, int, int]:
    schedule = data.draw(schedules())
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    return schedule, rank, data.draw(st.integers(0, len(schedule.order[rank]) - 1))


@examples(150)
@given(schedules())
def test_any_valid_schedule_is_accepted(schedule: Schedule):
    validate(schedule)


@examples(150)
@given(st.data())
def test_no_pass_can_be_left_out(data: st.DataObject):
    schedule, rank, place = _anywhere(data)
    row = schedule.order[rank]
    message = refused(changed(schedule, rank, row[:place] + row[place + 1 :]))
    assert "is missing" in message and str(row[place]) in message


@examples(150)
@given(st.data())
def test_no_pass_can_be_done_twice(data: st.DataObject):
    schedule, rank, place = _anywhere(data)
    row, again = schedule.order[rank], data.draw(st.integers(0, len(schedule.order[rank])))
    message = refused(changed(schedule, rank, row[:again] + (row[place],) + row[again:]))
    assert message.endswith(f"{row[place]} stands 2 times; every pass is done once")


@examples(100)
@given(st.data())
def test_no_pass_can_be_done_elsewhere(data: st.DataObject):
    schedule, rank, place = _anywhere(data)
    assume(schedule.ranks > 1)
    row, there = schedule.order[rank], (rank + 1) % schedule.ranks
    moved = changed(schedule, rank, row[:place] + row[place + 1 :])
    moved = changed(moved, there, (*moved.order[there], row[place]))
    assert f"{row[place]} on rank {there}: stage {row[place].stage} is on rank {rank}" in refused(moved)


@examples(150)
@given(st.data())
def test_no_pass_can_be_of_another_kind(data: st.DataObject):
    schedule, rank, place = _anywhere(data)
    row = schedule.order[rank]
    stage, kind, m = row[place]
    other = data.draw(st.sampled_from([k for k in Kind if k is not kind]))
    assert f"{schedule.name}: " in refused(
        changed(schedule, rank, (*row[:place], Pass(stage, other, m), *row[place + 1 :]))
    )


@examples(100)
@given(st.data())
def test_no_pass_can_be_of_a_microbatch_or_stage_there_is_not(data: st.DataObject):
    schedule, rank, place = _anywhere(data)
    row = schedule.order[rank]
    stage, kind, m = row[place]
    beyond = data.draw(st.integers(0, 3))
    wrong = data.draw(
        st.sampled_from(
            [Pass(stage, kind, schedule.microbatches + beyond), Pass(schedule.placement.stages + beyond, kind, m)]
        )
    )
    assert f"{wrong} on rank {rank}: there are only" in refused(
        changed(schedule, rank, (*row[:place], wrong, *row[place + 1 :]))
    )
