"""Passes are timed as the device does them: from when what they need has come, and nothing waits for the device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from torch import Tensor

from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.runtime.copies import ThreadCopies
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.program import Action, Program
from megatron.schedules.runtime.recorder import HostClock, Recorder
from megatron.schedules.runtime.transport import Transport
from tests.runtime import test_engine as engine
from tests.runtime.plain_stages import PlainStages
from tests.runtime.test_engine import NoTransport, one_rank
from tests.runtime.test_offload import OffloadingStages
from tests.runtime.thread_ranks import run_threads
from tools.gpu_tests.offloaded import offloaded


class Timed(engine.Recorder):
    """Stages whose passes sleep."""

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        time.sleep(0.02)
        return super().backward(stage, microbatch, gradient)


class DeviceClock:
    """A device that is behind its host: a moment is passed when the test says so."""

    def __init__(self) -> None:
        self.done, self.made, self.free = 0, 0, 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def passed(self, mark: int) -> bool:
        return mark <= self.done

    def between(self, earlier: int, later: int) -> float:
        assert later <= self.done, "an event that has not happened was read"
        return float(later - earlier)

    def reuse(self, marks: list[int]) -> None:
        self.free += len(marks)


def recorded(program: object, recorder: Recorder) -> None:
    recorder.begin()
    run(program, Timed(), NoTransport(), [recorder])  # type: ignore[arg-type]
    recorder.end()


def test_each_pass_has_its_own_time():
    recorder = Recorder(HostClock())
    recorded(one_rank("0F0 0B0 0F1 0B1", n=2), recorder)
    spans = recorder.take()
    assert spans is not None
    assert [str(span.work) for span in spans] == ["0F0", "0B0", "0F1", "0B1"]
    assert all(15 < span.end - span.start < 500 for span in spans[1::2])
    assert all(span.end - span.start < 15 for span in spans[::2])
    assert all(one.end <= other.start for one, other in pairwise(spans))
    assert recorder.take() is None


def test_nothing_is_read_before_the_device_has_come_so_far_and_every_mark_is_used_again():
    clock = DeviceClock()
    recorder = Recorder(clock)
    recorded(one_rank("0F0 0B0"), recorder)
    recorded(one_rank("0F0 0B0"), recorder)
    assert recorder.take() is None
    clock.done = 5
    first = recorder.take()
    assert first == [(Pass.parse("0F0"), 1.0, 2.0), (Pass.parse("0B0"), 3.0, 4.0)]
    assert recorder.take() is None
    clock.done = clock.made
    assert recorder.take() is not None
    assert clock.free == clock.made == 10


def test_the_time_waited_for_a_message_is_no_part_of_the_pass():
    late, schedule = 0.1, plan(Request("1f1b", 2, 2))
    recorders = [Recorder(HostClock()) for _ in range(2)]

    class Late(PlainStages):
        def forward(self, stage: int, *args: Any, **kwargs: Any) -> Tensor | None:
            if stage == 0:
                time.sleep(late)
            return super().forward(stage, *args, **kwargs)

    def body(program: Program, transport: Transport) -> None:
        recorder = recorders[program.rank]
        recorder.begin()
        run(program, Late((program.rank,), 1), transport, [recorder])
        recorder.end()

    run_threads(lower(schedule), body)
    first, second = (recorder.take() for recorder in recorders)
    assert first is not None and second is not None
    assert [first[0].work, second[0].work] == [Pass.parse("0F0"), Pass.parse("1F0")]
    assert first[0].end - first[0].start > 900 * late
    assert second[0].end - second[0].start < 500 * late < second[0].start


def test_copies_have_times_of_their_own_and_who_waits_for_one_does_not_compute():
    """Each copies three storages of 96 bytes, or four with the loss's, in 10 ms apiece; L stands right before B."""
    schedule = offloaded(plan(Request("1f1b", 2, 2)), lambda stage, m: (0, 0))
    recorders = [Recorder(HostClock()) for _ in range(2)]

    def body(program: Program, transport: Transport) -> None:
        recorder, offloads = recorders[program.rank], Offloads(ThreadCopies(9.6e-6))
        offloads.watch = recorder
        recorder.begin()
        run(program, OffloadingStages(program, offloads), transport, [recorder])
        recorder.end()

    run_threads(lower(schedule), body)
    for rank, recorder in enumerate(recorders):
        spans = recorder.take()
        assert spans is not None
        assert {str(span.work) for span in recorder.copies} == {f"{rank}{kind}{m}" for m in (0, 1) for kind in "OL"}
        for span in recorder.copies:
            assert span.end - span.start > 5 * (3 + rank), "as far as a busy machine wakes threads in time"
        times = {str(span.work): span for span in spans}
        back = {str(span.work): span for span in recorder.copies}
        for m in (0, 1):
            assert times[f"{rank}B{m}"].start >= back[f"{rank}L{m}"].end


def test_marks_of_copies_are_used_again_too():
    clock = DeviceClock()
    recorder = Recorder(clock)
    recorder.begin()
    recorder.began(Action(Kind.F, 0, 0))
    mark = recorder.copying()
    mark()
    recorder.ended(Action(Kind.F, 0, 0))
    mark()
    recorder.end()
    clock.done = clock.made
    assert recorder.take() == [(Pass.parse("0F0"), 1.0, 3.0)]
    assert recorder.copies == [(Pass.parse("0O0"), 2.0, 4.0)], "it ends after the pass that began it"
    assert clock.free == clock.made == 5
