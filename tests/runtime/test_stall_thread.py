"""The stall watch in its thread: slow programs go on, stalled ones end with one line, and it costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.stall_watch import StallWatch
from tests.counting import lines_run
from tests.runtime.test_engine import NoTransport, Recorder, one_rank
from tests.runtime.test_stall_watch import Device
from tests.waiting import HANGS_S


class Lines(list[str]):
    """What was said, and an event once something was."""

    def __init__(self) -> None:
        super().__init__()
        self.come = threading.Event()

    def add(self, line: str) -> None:
        self.append(line)
        self.come.set()


@pytest.fixture
def told() -> Iterator[tuple[Lines, Callable[[PositionTracker, float], StallWatch]]]:
    """Lines that watches end with, and how to start one."""
    lines = Lines()
    started: list[StallWatch] = []

    def start(tracker: PositionTracker, limit: float) -> StallWatch:
        watch = StallWatch(tracker, limit, global_rank=0, advice="raise --the-flag", end=lines.add)
        watch.start()
        started.append(watch)
        return watch

    yield lines, start
    for watch in started:
        watch.close()


class Sleeping(Recorder):
    """Stages whose forwards take time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        time.sleep(self._seconds)
        return super().forward(stage, microbatch, activation, split=split, recompute=recompute)


class Stalled(Recorder):
    """Stages whose forwards stall until a line is printed."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        assert self._lines.come.wait(HANGS_S)
        return super().forward(stage, microbatch, activation, split=split, recompute=recompute)


@pytest.mark.nightly
def test_a_slow_program_ends_in_silence_and_a_stalled_one_is_reported_with_its_frame(told):
    lines, start = told
    tracker = PositionTracker()
    start(tracker, 2.0)  # longer than a pass by far, shorter than all
    with tracker.running():
        run(one_rank("0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4", n=5), Sleeping(0.5), NoTransport(), (), tracker)
    assert lines == []
    with tracker.running():
        run(one_rank("0F0 0B0"), Stalled(lines), NoTransport(), (), tracker)
    (line,) = lines
    assert "pipeline rank 0 of 1 (global rank 0) has stalled for" in line and "in 0F0" in line
    number = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "_lines.come.wait(" in text)
    assert f"; host at {__file__}:{number} (forward); raise" in line


def test_frames_of_torch_and_of_python_itself_are_passed_over(told):
    lines, start = told
    tracker = PositionTracker()
    start(tracker, 0.1)

    class Waiting(Recorder):
        def forward(self, *args: object, **named: object) -> Tensor | None:
            return torch.overrides.wrap_torch_function(lambda: ())(partial(lines.come.wait, HANGS_S))()

    with tracker.running():
        run(one_rank("0F0 0B0"), Waiting(), NoTransport(), (), tracker)
    assert f"{__file__}:" in lines[0] and "(forward)" in lines[0]


def python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)


def test_a_stalled_process_ends_with_a_status_and_one_line():
    script = """
        import time
        from megatron.schedules.runtime.engine import run
        from megatron.schedules.runtime.position import PositionTracker
        from megatron.schedules.runtime.stall_watch import StallWatch
        from tests.runtime.test_engine import NoTransport, one_rank
        from tests.runtime.test_stall_thread import Sleeping
        print("said before")
        tracker = PositionTracker()
        StallWatch(tracker, 0.2, global_rank=0, advice="raise --the-flag").start()
        run(one_rank("0F0 0B0"), Sleeping(3600), NoTransport(), (), tracker)
    """
    done = python(script)
    assert done.returncode == 1
    assert done.stdout == "said before\n"
    assert done.stderr.count("\n") == 1 and "in 0F0" in done.stderr, done.stderr


def test_a_process_ends_even_where_nobody_reads_what_it_says():
    script = """
        import sys, time
        from megatron.schedules.runtime import stall_watch
        stall_watch._LAST_WORDS_S = 0.2
        sys.stdout.flush = lambda: time.sleep(3600)  # as into a pipe that is full
        stall_watch.end_process("the line")
    """
    done = python(script)
    assert done.returncode == 1
    assert done.stderr.startswith("the line\n")


def test_watching_costs_next_to_nothing(told):
    """20 lines of Python a pass, those of the test's device among them."""
    _, start = told
    n = 64
    program = one_rank(" ".join([f"0F{m}" for m in range(n)] + [f"0{kind}{m}" for kind in "IW" for m in range(n)]), n=n)
    tracker = PositionTracker(Device(at_once=True).mark)
    start(tracker, 2.0)

    def watched() -> None:
        with tracker.running():
            run(program, Recorder(), NoTransport(), (), tracker)

    watched()  # what a program is asked first, it remembers
    plain = lines_run(lambda: run(program, Recorder(), NoTransport()))
    assert lines_run(watched) < plain + 20 * len(program.actions)
