"""The stall watch: what moves is left alone; what has stalled is named, on the host and on the device."""

from __future__ import annotations

import threading
import weakref

import pytest
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Instruction, Program
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.position import End, PositionTracker
from megatron.schedules.runtime.stall_watch import StallWatch
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Kind
from tests.programs.random_schedules import forwards_of, shared_plan
from tests.runtime.plain_stages import PlainStages
from tests.runtime.thread_ranks import run_threads

LIMIT, GRACE = 100.0, 12.5


class Mark:
    """An event that a test completes."""

    def __init__(self) -> None:
        self.passed = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.passed


class Device:
    """Makes the marks of a device, which comes to them when a test says so."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.marks: list[Mark] = []
        self._at_once = at_once

    def mark(self) -> Mark:
        self.marks.append(Mark())
        self.marks[-1].passed = self._at_once
        return self.marks[-1]

    def passes(self, count: int) -> None:
        for mark in [each for each in self.marks if not each.passed][:count]:
            mark.passed = True


def watching(tracker: PositionTracker) -> StallWatch:
    return StallWatch(tracker, LIMIT, global_rank=7, advice="raise --the-flag")


def program_of(rank: int, name: str = "1f1b", ranks: int = 2, n: int = 4) -> Program:
    return lower(plan(Request(name, ranks, n)))[rank]


def step(program: Program, action: str) -> Instruction:
    return next(each for each in program.instructions if str(each.action) == action)


def at(program: Program, *actions: str, tracker: PositionTracker | None = None) -> PositionTracker:
    """A tracker whose host has gone through ``actions`` to the last of them, messages being there."""
    tracker = warm(tracker or PositionTracker())
    tracker.begin(program)
    for action in actions:
        tracker.reach(step(program, action))
        if tracker.host is not None and tracker.host.awaits and action is not actions[-1]:
            tracker.arrived()
    return tracker


def warm(tracker: PositionTracker) -> PositionTracker:
    """``tracker`` after a first program, whose kernels are compiled."""
    tracker.warm = True
    return tracker


def stalled_line(watch: StallWatch, seconds: float, looks: int = 50) -> str | None:
    """The line, where nothing moves for ``seconds``."""
    return next((line for _ in range(looks) if (line := watch.look(seconds / looks))), None)


def test_a_pass_that_waits_for_a_message_names_it_and_its_sender():
    tracker = at(program_of(1), "1F0")
    watch = watching(tracker)
    assert stalled_line(watch, LIMIT + GRACE - 3) is None, "ranks that stall in a pass of their own report first"
    line = stalled_line(watch, 6)
    assert line is not None and "\n" not in line
    assert "error: pipeline rank 1 of 2 (global rank 7) has stalled for 11" in line
    assert "s at 1F0: stage 1's input of microbatch 0 has not come from pipeline rank 0, which has died" in line
    assert line.endswith("; raise --the-flag")


@pytest.mark.parametrize(
    ("rank", "actions", "waits", "said"),
    [
        (0, ["0F0"], False, "in 0F0, which takes longer than that (a first compilation, loading of data) or waits"),
        (0, ["0F0", "0SEND_F0"], True, "at 0SEND_F0, a message to pipeline rank 1, which has died"),
        (1, ["1RECV_F0"], True, "at 1RECV_F0, a message from pipeline rank 0, which has died"),
        (
            0,
            ["0B0"],
            True,
            "at 0B0: stage 0's output's gradient of microbatch 0 has not come from pipeline rank 1, which",
        ),
        (0, ["0REDUCE3"], False, "in 0REDUCE3, which starts a reduction of gradients or waits for what does not come"),
    ],
)
def test_each_kind_of_step_says_what_is_waited_for(rank: int, actions: list[str], waits: bool, said: str):
    watch = watching(at(program_of(rank), *actions))
    line = stalled_line(watch, LIMIT + 3)
    assert (line is None) == waits, "a rank that waits for another lets it report first"
    line = line or stalled_line(watch, GRACE)
    assert line is not None and said in line


@pytest.mark.parametrize(
    ("rank", "action", "waits", "said"),
    [
        (0, "0F1", True, "at 0F1: the result of 0EMBED1 has not come from some pipeline rank, which has died"),
        (0, "0S1", True, "at 0S1: the result of 0OUTPUT1 has not come from pipeline rank 1, which has died"),
        (1, "1S1", True, "at 1S1: the result of 1OUTPUT1 has not come from some pipeline rank, which has died"),
        (1, "1B1", True, "at 1B1: the result of 1SUM1 has not come from some pipeline rank, which has died"),
        (0, "0T1", True, "at 0T1: the result of 0WEIGH1 has not come from pipeline rank 1, which has died"),
        (1, "1ADD1", True, "at 1ADD1: the result of 1EMBED_BACK1 has not come from pipeline rank 0, which has died"),
        (0, "0EMBED1", False, "in 0EMBED1, which takes longer than that (a first compilation, loading of data) or"),
    ],
)
def test_what_a_collective_brings_is_named_with_whom_it_comes_from(rank: int, action: str, waits: bool, said: str):
    program = lower(shared_plan("1f1b", 2, 4))[rank]
    tracker = at(program, action)
    watch = watching(tracker)
    line = stalled_line(watch, LIMIT + 3)
    assert (line is None) == waits, "a rank that waits for another lets it report first"
    line = line or stalled_line(watch, GRACE)
    assert line is not None and said in line
    tracker.arrived()
    line = stalled_line(watching(tracker), LIMIT + 3)
    assert line is not None and f"in {action}, which takes longer than that" in line


def test_the_end_names_collectives_too():
    tracker = at(lower(forwards_of(shared_plan("1f1b", 2, 4)))[0], "0S3")
    tracker.reach(End.SENDS)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None
    assert (
        "its last messages are not received by pipeline rank 1, or a rank has not joined its last collective," in line
    )


def test_a_pass_whose_message_is_there_waits_for_nobody_and_is_reported_at_the_limit():
    tracker = at(program_of(1), "1F0")
    tracker.arrived()
    watch = watching(tracker)
    assert stalled_line(watch, LIMIT - 3) is None
    line = watch.look(4)
    assert line is not None and "has stalled for 101 s in 1F0, which takes longer than that" in line


def test_chunks_of_one_rank_wait_for_no_message():
    """In a V the rank at its turn hands a tensor on to itself."""
    tracker = at(program_of(1, "v-half"), "2F0")
    assert tracker.host is not None and not tracker.host.awaits


def test_the_end_names_who_takes_the_last_messages():
    tracker = at(program_of(1, "1f1b", ranks=3))
    tracker.reach(End.SENDS)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None
    assert "at the end of its program: its last messages are not received by pipeline rank 0 or 2, which has" in line
    tracker.reach(End.AFTER)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None and "after its program, where all ranks exchange results and gradients" in line


def test_the_first_program_has_four_times_the_limit_for_compiling_and_loading():
    tracker = PositionTracker()
    watch = watching(tracker)
    with tracker.running():
        tracker.begin(program_of(0))
        tracker.reach(step(program_of(0), "0F0"))
        assert stalled_line(watch, 4 * LIMIT - 3) is None
        line = watch.look(4)
        assert line is not None and "has stalled for 401 s in 0F0" in line
    with pytest.raises(ValueError), tracker.running():
        raise ValueError
    with tracker.running():
        tracker.begin(program_of(0))
        tracker.reach(step(program_of(0), "0F0"))
        assert stalled_line(watch, LIMIT - 3) is None
        line = watch.look(4)
        assert line is not None and "has stalled for 101 s in 0F0" in line


def test_a_program_that_failed_does_not_end_the_first_ones_allowance():
    tracker = PositionTracker()
    with pytest.raises(ValueError), tracker.running():
        tracker.begin(program_of(0))
        raise ValueError
    with tracker.running():
        tracker.begin(program_of(0))
        tracker.reach(step(program_of(0), "0F0"))
        assert stalled_line(watching(tracker), 2 * LIMIT) is None


def test_any_progress_restarts_the_count():
    """Passes of nearly the limit each, and the same instruction in run after run, are no stall."""
    program, tracker = program_of(1), PositionTracker()
    watch = watching(tracker)
    for _ in range(3):
        with tracker.running():
            tracker.begin(program)
            for each in program.instructions[:6]:
                tracker.reach(each)
                assert stalled_line(watch, LIMIT - 2) is None
                if tracker.host is not None and tracker.host.awaits:
                    tracker.arrived()
                    assert stalled_line(watch, LIMIT - 2) is None
    for _ in range(10):
        tracker.begin(program)
        tracker.reach(program.instructions[0])
        assert stalled_line(watch, LIMIT - 2) is None


def test_between_programs_nothing_is_watched():
    tracker = PositionTracker()
    watch = watching(tracker)
    assert stalled_line(watch, 10 * LIMIT) is None
    with tracker.running():
        at(program_of(0), "0F0", tracker=tracker)
    assert stalled_line(watch, 10 * LIMIT) is None


def test_what_an_error_left_undone_is_not_watched():
    tracker = PositionTracker(Device().mark)
    with pytest.raises(ValueError), tracker.running():
        at(program_of(0), "0F0", "0SEND_F0", tracker=tracker)
        raise ValueError
    assert stalled_line(watching(tracker), 10 * LIMIT) is None


def test_the_engine_notes_each_step_and_that_its_message_has_come():
    programs = lower(plan(Request("v-half", 2, 3)))
    trackers = [PositionTracker() for _ in programs]
    seen: list[list[tuple[str, int | None]]] = [[] for _ in programs]

    def body(program: Program, transport: Transport) -> None:
        tracker = trackers[program.rank]

        class Noting(PlainStages):
            def forward(
                self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
            ) -> Tensor | None:
                position = tracker.host
                assert position is not None and isinstance(position.step, Instruction)
                seen[program.rank].append((str(position.step.action), position.awaited))
                return super().forward(stage, microbatch, activation, split=split, recompute=recompute)

        placement = program.placement
        run(program, Noting(placement.stages_of(program.rank), placement.last_stage), transport, (), tracker)

    run_threads(programs, body)
    for program, forwards in zip(programs, seen, strict=True):
        assert forwards == [(str(action), None) for action in program.actions if action.op is Kind.F]
    assert [tracker.host and tracker.host.step for tracker in trackers] == [End.AFTER] * 2


# --- the device ---------------------------------------------------------------------------------------------------


def test_a_device_that_stalls_is_named_where_it_stalls_though_the_host_ran_ahead():
    device = Device()
    tracker = PositionTracker(device.mark)
    watch = watching(tracker)
    with tracker.running():
        at(program_of(1), "1F0", "1F1", "1F2", tracker=tracker)
        device.passes(2)  # 1F0: its message, and itself
        line = stalled_line(watch, 2 * LIMIT)
        assert line is not None and "the GPU of pipeline rank 1 of 2 (global rank 7) has stalled for" in line
        assert "at 1F1: stage 1's input of microbatch 1 has not come from pipeline rank 0" in line
        device.passes(1)
        line = stalled_line(watch, 2 * LIMIT)
        assert line is not None and "the GPU of" in line and "in 1F1, which takes longer than that" in line


def test_a_device_that_waits_for_an_earlier_send_names_its_receiver():
    device = Device()
    tracker = PositionTracker(device.mark)
    with tracker.running():
        at(program_of(0), "0F0", "0SEND_F0", "0F1", tracker=tracker)
    device.passes(1)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None and "the GPU of" in line and "at 0SEND_F0, a message to pipeline rank 1, which has" in line


def test_a_device_that_waits_for_a_collective_is_named():
    """Gradients of the embedding are work for the device, though no pass."""
    device = Device()
    tracker = PositionTracker(device.mark)
    with tracker.running():
        at(lower(shared_plan("1f1b", 2, 4))[1], "1S0", "1ADD3", tracker=tracker)
        tracker.reach(End.SENDS)
    device.passes(2)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None and "the GPU of" in line
    assert "at 1ADD3: the result of 1EMBED_BACK3 has not come from pipeline rank 0" in line


def test_a_device_that_has_done_all_leaves_the_host_to_be_named():
    device = Device()
    tracker = PositionTracker(device.mark)
    at(program_of(1), "1F0", "1F1", tracker=tracker)
    device.passes(9)
    line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None and "error: pipeline rank 1" in line and "at 1F1: stage 1's input" in line


def test_a_device_that_does_not_reach_the_end_is_reported_after_the_program():
    device = Device()
    tracker = PositionTracker(device.mark)
    watch = watching(tracker)
    with tracker.running():
        at(program_of(1), "1F0", tracker=tracker)
        tracker.reach(End.SENDS)
        tracker.reach(End.AFTER)
    device.passes(1)
    line = stalled_line(watch, 2 * LIMIT)
    assert line is not None and "the GPU of" in line and "at the end of its program" in line
    device.passes(1)
    line = stalled_line(watch, 2 * LIMIT)
    assert line is not None and "after its program" in line
    device.passes(1)
    assert stalled_line(watch, 10 * LIMIT) is None


def test_the_device_is_asked_only_where_the_host_has_stalled_and_once_a_limit():
    """Between programs, while a checkpoint is written perhaps."""
    device = Device()
    tracker = PositionTracker(device.mark)
    watch = watching(tracker)
    with tracker.running():
        at(program_of(0), "0F0", tracker=tracker)
    (mark,) = device.marks
    mark.passed, mark.asked = True, 0
    assert stalled_line(watch, LIMIT - 1) is None and mark.asked == 0
    assert stalled_line(watch, 3 * LIMIT) is None and mark.asked == 3


def test_a_host_that_waits_long_for_a_device_that_moves_is_let_be():
    device = Device()
    tracker = PositionTracker(device.mark)
    watch = watching(tracker)
    program = program_of(1, n=64)
    at(program, *(f"1F{m}" for m in range(64)), tracker=tracker)
    for _ in range(len(device.marks) - 1):
        assert stalled_line(watch, GRACE - 1) is None
        device.passes(1)


def test_no_position_of_a_device_that_is_far_behind_is_lost():
    device = Device()
    tracker = PositionTracker(device.mark)
    program = program_of(1, n=64)
    with tracker.running():
        at(program, "1F0", "1F1", tracker=tracker)
        device.passes(2)  # 1F0: its message, and itself
        at(program, *(f"1F{m}" for m in range(2, 64)), tracker=tracker)
        line = stalled_line(watching(tracker), 2 * LIMIT)
    assert line is not None and "the GPU of" in line and "at 1F1: stage 1's input of microbatch 1 has not" in line


def test_a_device_that_fails_is_left_to_the_host():
    class Broken:
        def query(self) -> bool:
            if threading.current_thread() is threading.main_thread() and not looking:
                return False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    looking: list[bool] = []
    tracker = PositionTracker(Broken)
    with tracker.running():
        at(program_of(1), "1F0", "1F1", tracker=tracker)
    looking.append(True)
    assert stalled_line(watching(tracker), 10 * LIMIT) is None


def test_marks_do_not_accumulate():
    device = Device(at_once=True)
    tracker = PositionTracker(device.mark)
    kept: list[weakref.ref[Mark]] = []
    with tracker.running():
        for _ in range(20):
            at(program_of(1), "1F0", "1F1", "1F2", tracker=tracker)
            # Of each pass that it left: its message, and itself; one is of the round before.
            assert len(device.marks) == (5 if kept else 4)
            kept += map(weakref.ref, device.marks)
            device.marks.clear()
            assert sum(mark() is not None for mark in kept) <= 16
    assert len(kept) > 16 and all(mark() is None for mark in kept)
    assert not tracker.device_is_behind
