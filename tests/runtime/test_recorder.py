"""Passes are timed as the device does them: from when what they need has come, and nothing waits for the device."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Action, Program
from megatron.schedules.runtime.copies import Pace, ThreadCopies
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.recorder import HostClock, Recorder
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Kind, Pass
from tests.runtime import test_engine as engine
from tests.runtime.plain_stages import PlainStages
from tests.runtime.test_engine import NoTransport, one_rank
from tests.runtime.test_offload import OffloadingStages
from tests.runtime.thread_ranks import run_threads
from tests.support.offloaded import offloaded


class HandClock:
    """A clock of a CPU, in milliseconds, that goes forward where a test says so; several threads may do that."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def forward(self, milliseconds: float) -> None:
        with self._lock:
            self.now += milliseconds

    def event(self) -> HandEvent:
        return HandEvent(self)


class HandEvent:
    """An event of a :class:`HandClock`."""

    def __init__(self, clock: HandClock) -> None:
        self._clock, self._time = clock, 0.0

    def record(self) -> None:
        self._time = self._clock.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HandEvent) -> float:
        return later._time - self._time


class Timed(engine.Recorder):
    """Stages whose backwards take 20 ms."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._clock.forward(20)
        return super().backward(stage, microbatch, gradient)


class DeviceClock:
    """A device that is behind its host: a moment is passed when the test says so."""

    def __init__(self) -> None:
        self.done, self.recorded, self.made = 0, 0, 0

    def event(self) -> DeviceEvent:
        self.made += 1
        return DeviceEvent(self)


class DeviceEvent:
    """An event of a :class:`DeviceClock`: the n-th that is recorded happens at n."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock, self._at = clock, 0

    def record(self) -> None:
        self._clock.recorded += 1
        self._at = self._clock.recorded

    def query(self) -> bool:
        return self._at <= self._clock.done

    def elapsed_time(self, later: DeviceEvent) -> float:
        assert later.query(), "an event that has not happened was read"
        return float(later._at - self._at)


def recorded(program: object, recorder: Recorder, clock: HandClock | None = None) -> None:
    recorder.begin()
    run(program, Timed(clock or HandClock()), NoTransport(), [recorder])  # type: ignore[arg-type]
    recorder.end()


def test_each_pass_has_its_own_time():
    clock = HandClock()
    recorder = Recorder(clock)
    recorded(one_rank("0F0 0B0 0F1 0B1", n=2), recorder, clock)
    spans = recorder.take()
    assert spans is not None
    assert [(str(span.work), span.start, span.end) for span in spans] == [
        ("0F0", 0, 0),
        ("0B0", 0, 20),
        ("0F1", 20, 20),
        ("0B1", 20, 40),
    ]
    assert recorder.take() is None


def test_host_events_go_forward_in_milliseconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.perf_counter", iter((3.0, 3.25)).__next__)
    earlier, later = HostClock().event(), HostClock().event()
    earlier.record()
    later.record()
    assert earlier.elapsed_time(later) == 250 and later.query()


def test_passes_of_host_events_follow_each_other():
    recorder = Recorder(HostClock())
    recorded(one_rank("0F0 0B0 0F1 0B1", n=2), recorder)
    spans = recorder.take()
    assert spans is not None
    assert all(0 <= span.start <= span.end for span in spans)
    assert all(one.end <= other.start for one, other in pairwise(spans))


def test_no_event_is_read_before_it_has_happened_and_all_are_reused():
    clock = DeviceClock()
    recorder = Recorder(clock)
    recorded(one_rank("0F0 0B0"), recorder)
    recorded(one_rank("0F0 0B0"), recorder)
    assert recorder.take() is None
    clock.done = 5
    first = recorder.take()
    assert first == [(Pass.parse("0F0"), 1.0, 2.0), (Pass.parse("0B0"), 3.0, 4.0)]
    assert recorder.take() is None
    clock.done = clock.recorded
    assert recorder.take() is not None
    assert clock.made == 10
    for _ in range(2):
        recorded(one_rank("0F0 0B0"), recorder)
    assert clock.made == 10


def test_the_time_waited_for_a_message_is_no_part_of_the_pass():
    schedule, clock, both = plan(Request("1f1b", 2, 2)), HandClock(), threading.Barrier(2)
    recorders = [Recorder(clock) for _ in range(2)]

    class Late(PlainStages):
        def forward(self, stage: int, microbatch: int, *args: Any, **kwargs: Any) -> Tensor | None:
            if (stage, microbatch) == (0, 0):
                clock.forward(100)
            return super().forward(stage, microbatch, *args, **kwargs)

    def body(program: Program, transport: Transport) -> None:
        recorder = recorders[program.rank]
        recorder.begin()
        both.wait(600)
        run(program, Late((program.rank,), 1), transport, [recorder])
        recorder.end()

    run_threads(lower(schedule), body)
    first, second = (recorder.take() for recorder in recorders)
    assert first is not None and second is not None
    assert first[0] == (Pass.parse("0F0"), 0, 100)
    assert second[0] == (Pass.parse("1F0"), 100, 100)


def test_copies_have_times_of_their_own_and_who_waits_for_one_does_not_compute():
    """Each copies three storages of 96 bytes, or four with the loss's, in 10 ms apiece; L stands right before B."""
    schedule, clock = offloaded(plan(Request("1f1b", 2, 2)), lambda stage, m: (0, 0)), HandClock()
    recorders = [Recorder(clock) for _ in range(2)]
    # A copy sleeps from 0 to its end, which is at least as long as it takes.
    pace = Pace(lambda: 0.0, lambda seconds: clock.forward(1e3 * seconds))

    def body(program: Program, transport: Transport) -> None:
        recorder, offloads = recorders[program.rank], Offloads(ThreadCopies(9.6e-6, pace=pace))
        offloads.copies.watch = recorder
        recorder.begin()
        run(program, OffloadingStages(program, offloads), transport, [recorder])
        recorder.end()

    run_threads(lower(schedule), body)
    for rank, recorder in enumerate(recorders):
        spans = recorder.take()
        assert spans is not None
        assert {str(span.work) for span in recorder.copies} == {f"{rank}{kind}{m}" for m in (0, 1) for kind in "OL"}
        for span in recorder.copies:
            assert span.end - span.start > 9.99 * (3 + rank)
        times = {str(span.work): span for span in spans}
        back = {str(span.work): span for span in recorder.copies}
        for m in (0, 1):
            assert times[f"{rank}B{m}"].start >= back[f"{rank}L{m}"].end


def test_messages_inside_a_pass_say_what_ran_behind_them_and_what_was_waited():
    clock = DeviceClock()
    recorder = Recorder(clock)
    for _ in range(2):
        recorder.begin()
        recorder.began(Action(Kind.F, 0, 0))
        for _ in range(2):
            mark = recorder.message()
            mark()
            clock.recorded += 3  # the device waits
            mark()
        recorder.ended(Action(Kind.F, 0, 0))
        recorder.end()
        clock.done = clock.recorded
        assert recorder.take() == [(Pass.parse("0F0"), 1.0, 14.0)]
        assert recorder.messages == [(Pass.parse("0F0"), 1.0, 4.0)] * 2
    assert clock.made == 9, "their events are used again"


def test_events_of_copies_are_reused_too():
    clock = DeviceClock()
    recorder = Recorder(clock)
    for _ in range(2):
        recorder.begin()
        recorder.began(Action(Kind.F, 0, 0))
        mark = recorder.copying()
        mark()
        recorder.ended(Action(Kind.F, 0, 0))
        mark()
        recorder.end()
        clock.done = clock.recorded
        assert recorder.take() == [(Pass.parse("0F0"), 1.0, 3.0)]
        assert recorder.copies == [(Pass.parse("0O0"), 2.0, 4.0)], "it ends after the pass that began it"
    assert clock.made == 5
