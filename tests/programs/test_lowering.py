"""Lowering: every message in its place, whatever the schedule and the placement."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Op, Program, ProgramError, channels_of
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from tests.counting import lines_run
from tests.programs.messages import messages
from tests.programs.random_schedules import forwards_of, random_schedule

SENDS = (Op.SEND_F, Op.SEND_B)
RECEIVES = (Op.RECV_F, Op.RECV_B)


def schedule(placement: Placement, n: int, *rows: str) -> Schedule:
    """A schedule written as one line of passes for each rank."""
    return Schedule("by hand", placement, n, tuple(tuple(map(Pass.parse, row.split())) for row in rows))


def texts(programs: tuple[Program, ...]) -> list[str]:
    return [" ".join(map(str, program.actions)) for program in programs]


def test_sends_follow_their_pass_and_receives_come_before_the_pass_in_which_they_are_sent():
    one_f_one_b = schedule(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert texts(lower(one_f_one_b)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE1",
    ]


def test_the_position_of_a_receive_depends_on_the_times_of_passes():
    one_f_one_b = schedule(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    slow = uneven(Costs(), (2, 1)).on(sequential(2))
    assert texts(lower(one_f_one_b, slow))[1] == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE1"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0F1 0B0 0B1", True),
        ("0F0 0F1 0B1 0B0", False),
        ("0F0 0F1 0I0 0W0 0B1", False),
        ("0F0 0F1", True),
    ],
    ids=["as stock", "another order", "split", "evaluation"],
)
def test_a_program_tells_whether_its_backwards_are_stocks(row: str, expected: bool):
    """Megatron's linears may rely on it: the first microbatch's gradient can overwrite what is there."""
    (program,) = lower(schedule(sequential(1), 2, row))
    assert program.backward_is_stocks == expected


def test_messages_that_a_rank_holds():
    """Ahead of the pass that uses them, and the last two that were sent to each peer."""
    one_f_one_b = schedule(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    first, second = lower(one_f_one_b)
    assert [first.messages_held, second.messages_held] == [2, 1], "two inputs sent; one ahead of the first's B"
    v = lower(plan(Request("v-half", 4, 8)))
    assert max(program.messages_held for program in v) == 6


def test_the_turn_of_the_v_needs_no_message_and_both_directions_share_a_pair():
    v = schedule(v_shape(2), 1, "0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2I0 1I0 2W0 1W0")
    programs = lower(v)
    assert texts(programs) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3REDUCE0 0RECV_B0 0B0 0REDUCE0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 2REDUCE0 1W0 1REDUCE0",
    ]
    assert programs[0].splits(3, 0) and not programs[0].splits(0, 0)


def test_wrap_around_between_two_ranks():
    """Both neighbours are the same rank, and every boundary between stages is crossed."""
    passes = schedule(interleaved(2, 2), 1, "0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    assert texts(lower(passes)) == [
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2REDUCE0 0RECV_B0 0B0 0REDUCE0",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 3REDUCE0 1RECV_B0 1B0 1SEND_B0 1REDUCE0",
    ]


def test_receives_have_the_order_of_the_sends_even_if_they_are_used_in_another():
    crossed = schedule(sequential(2), 3, "0F0 0F1 0F2", "1F2 1F0 1F1")
    receiver = lower(crossed)[1]
    assert str(receiver) == "rank 1: 1RECV_F0 1RECV_F1 1RECV_F2 1F2 1F0 1F1"


def test_passes_are_carried_out_as_they_were_drawn():
    """An I and its W side by side are two passes, whether anybody waits between them or not."""
    placement = Placement("custom", (0, 1, 1, 0))
    passes = schedule(placement, 1, "0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2B0 1I0 1W0")
    programs = lower(passes)
    assert _passes(programs[0]) == ["0F0", "3F0", "3I0", "3W0", "0I0", "0W0"]
    assert _passes(programs[1]) == ["1F0", "2F0", "2B0", "1I0", "1W0"]
    assert programs[1].splits(1, 0) and not programs[1].splits(2, 0)


def test_reductions_start_once_their_stage_has_all_its_gradients():
    passes = schedule(sequential(1), 2, "0F0 0F1 0I0 0B1 0W0")
    assert texts(lower(passes)) == ["0F0 0F1 0I0 0B1 0W0 0REDUCE0"]
    assert texts(lower(forwards_of(passes))) == ["0F0 0F1"]


def test_one_rank_sends_nothing():
    (program,) = lower(schedule(sequential(1), 2, "0F0 0F1 0I1 0I0 0W1 0W0"))
    assert str(program) == "rank 0: 0F0 0F1 0I1 0I0 0W1 0W0 0REDUCE0"
    assert channels_of(sequential(1)) == ()


def test_a_result_that_its_receiver_never_uses_is_refused():
    with pytest.raises(ProgramError, match=r"rank 1 is sent a message for 1RECV_F0 and never uses it"):
        lower(schedule(sequential(2), 1, "0F0", ""))


def test_channels_are_both_directions_of_every_link():
    assert channels_of(sequential(3)) == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert channels_of(v_shape(3)) == channels_of(sequential(3))
    assert (2, 0) in channels_of(interleaved(3, 2)) and (0, 2) in channels_of(interleaved(3, 2))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), forward_only=st.booleans())
def test_any_valid_schedule(seed: int, forward_only: bool):
    passes = random_schedule(seed, recompute=True)
    if forward_only:
        passes = forwards_of(passes)
    programs = lower(passes)
    check(programs)
    sent = messages(programs)
    assert set(sent) <= set(channels_of(passes.placement))
    for program in programs:
        assert _passes(program) == [str(work) for work in passes.order[program.rank]]
        _check_sends(program)
    _check_receives(passes, programs)
    rank_of = passes.placement.rank_of
    latencies = sum(a != b for a, b in pairwise(rank_of)) * passes.microbatches
    assert sum(sent.values()) == latencies * (1 if forward_only else 2)


def _passes(program: Program) -> list[str]:
    return [str(action) for action in program.actions if isinstance(action.op, Kind)]


def _check_sends(program: Program) -> None:
    """A result goes out right after the pass that made it."""
    for before, action in pairwise(program.actions):
        if action.op in SENDS:
            assert (before.stage, before.microbatch) == (action.stage, action.microbatch)
            assert before.op in ((Kind.F,) if action.op is Op.SEND_F else (Kind.I, Kind.B))


def _check_receives(passes: Schedule, programs: tuple[Program, ...]) -> None:
    """A receive stands after all passes that are planned to end before its message is made, and before all others."""
    timeline = simulate(passes, Costs().on(passes.placement))
    end = {
        work: at
        for row, ends in zip(passes.order, timeline.end, strict=True)
        for work, at in zip(row, ends, strict=True)
    }
    for program in programs:
        ended, waiting = 0.0, 0.0
        for op, stage, m, _ in program.actions:
            if op in RECEIVES:
                makers = [Pass(stage - 1, Kind.F, m)] if op is Op.RECV_F else [Pass(stage + 1, k, m) for k in "IB"]
                made = next(end[maker] for maker in makers if maker in end)
                assert ended <= made
                waiting = max(waiting, made)
            elif isinstance(op, Kind):
                ended = end[Pass(stage, op, m)]
                assert waiting <= ended


@pytest.mark.parametrize("name", [name for name in NAMES if name != "file"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_named_schedules(name: str, ranks: int):
    for n in (1, 2, ranks - 1, ranks, 2 * ranks + 1):
        planned = plan(Request(name, ranks, n, memory_limit=0.6, search_seconds=0.01))
        for passes in (planned, forwards_of(planned)):
            check(lower(passes))


def in_phases(d: int, n: int) -> Schedule:
    """All forwards, then all backwards, in a V."""
    placement = v_shape(d)
    rows = []
    for rank in range(d):
        down, up = placement.stages_of(rank)
        row = [Pass(down, Kind.F, m) for m in range(n)] + [Pass(up, Kind.F, m) for m in range(n)]
        row += [Pass(stage, kind, m) for stage in (up, down) for m in range(n) for kind in (Kind.I, Kind.W)]
        rows.append(tuple(row))
    return Schedule("in phases", placement, n, tuple(rows))


def test_eight_times_the_passes_are_eight_times_the_work():
    """Lines of Python that are run; growing with the square it would be 64 times."""
    small, large = in_phases(8, 32), in_phases(16, 128)
    assert lines_run(lambda: lower(large)) < 1.1 * 8 * lines_run(lambda: lower(small))
    few, many = lower(small), lower(large)
    assert lines_run(lambda: check(many)) < 1.1 * 8 * lines_run(lambda: check(few))


@pytest.mark.nightly
def test_a_large_schedule_is_lowered_and_checked():
    """64 ranks, two chunks, 512 microbatches: 196,608 passes and 260,096 messages."""
    d, n = 64, 512
    large = in_phases(d, n)
    programs = lower(large)
    check(programs)
    assert sum(messages(programs).values()) == 2 * (2 * d - 2) * n
    small = replace(large, order=((),) * d)
    assert all(not program.actions for program in lower(small))
