"""Watchers of passes: for waits, for times, for names in a profile, and one that leaves little memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.schedules.integration.cpu import standin
from megatron.schedules.programs.program import Action, Program
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement
from tools.gpu_tests.timeline import Span

_ON_CPU = standin.needed()


class NoWaits:
    """Raises, from the second program on, where a pass waits for the device; on a CPU, records it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._programs = count()
        self._strict = False

    @contextmanager
    def program(self, program: Program) -> Iterator[None]:
        self._strict = next(self._programs) > 0  # what is made once, in the first iteration, costs nothing
        if not _ON_CPU and not self._strict:
            _must_raise()
        if not (_ON_CPU and self._strict):
            yield
            return
        from tests.integration.sync_detector import detected

        with detected() as detector:
            yield
        self.found += detector.found

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if _ON_CPU or not self._strict:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _must_raise() -> None:
    """Checks that torch's check raises where something waits."""
    number = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        number.item()
    except RuntimeError:
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise AssertionError("torch.cuda.set_sync_debug_mode lets a read of the device go by")


class Timed(NamedTuple):
    """A rank's part of a schedule, and its passes in every iteration."""

    placement: Placement
    microbatches: int
    order: tuple[Pass, ...]
    iterations: list[list[Span]]


class Spans:
    """Start and end of each pass on the device, in seconds of a clock that all ranks of a machine share."""

    def __init__(self) -> None:
        self.found: Timed | None = None
        self._events: list[tuple[Action, Any, Any]] = []

    @contextmanager
    def program(self, program: Program) -> Iterator[None]:
        self._events = []
        dist.barrier()
        torch.cuda.synchronize()
        zero = _event()
        zero.synchronize()
        clock = time.perf_counter()
        yield
        torch.cuda.synchronize()
        spans = [
            Span(action, clock + zero.elapsed_time(began) / 1e3, clock + zero.elapsed_time(ended) / 1e3)
            for action, began, ended in self._events
        ]
        before = [] if self.found is None else self.found.iterations
        order = tuple(Pass(a.stage, a.op, a.microbatch) for a in program.actions if isinstance(a.op, Kind))
        self.found = Timed(program.placement, program.microbatches, order, [*before, spans])

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if not isinstance(action.op, Kind):
            yield
            return
        began = _event()
        yield
        self._events.append((action, began, _event()))


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Names(NamedTuple):
    """The names of one program in a profile.

    Args:
        wanted: the program's actions, as they should be named.
        seen: the names in the profile that begin with a digit, in order.
        kernels: how many kernels of the device it holds.
    """

    wanted: list[str]
    seen: list[str]
    kernels: int


class Profiled:
    """A profile of the second program."""

    def __init__(self) -> None:
        self.found: Names | None = None
        self._programs = count()

    @contextmanager
    def program(self, program: Program) -> Iterator[None]:
        if next(self._programs) != 1:
            yield
            return
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU] if _ON_CPU else [kinds.CPU, kinds.CUDA]) as profile:
            yield
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        # Not ``profile.events()``: it takes 3F12 for a mangled name of C++, and gives F12.
        named = [e for e in events if e.get("cat") == "user_annotation" and e["name"][:1].isdigit()]
        named.sort(key=lambda event: float(event["ts"]))
        kernels = sum(event.get("cat") == "kernel" for event in events)
        self.found = Names([str(action) for action in program.actions], [event["name"] for event in named], kernels)

    def action(self, action: Action) -> Any:
        return nullcontext()


class LittleMemory:
    """Limits memory, from the second program on, to little more than the first took; allocates blocks of new sizes.

    A block that fits into none of the cached ones is asked of the driver, which refuses: the allocator gives cached
    ones back, and waits for the device to do so.
    """

    _SPARE, _STEP, _STEPS = 1 << 30, 8 << 20, 64

    def __init__(self) -> None:
        self._programs, self._sizes = count(), count()
        self._scarce = False
        self._retries_before = 0

    @property
    def found(self) -> int:
        """Returns the number of allocation retries."""
        return _retries() - self._retries_before

    @contextmanager
    def program(self, program: Program) -> Iterator[None]:
        if next(self._programs) == 1:
            self._scarce, self._retries_before = True, _retries()
            if not _ON_CPU:
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                held = torch.cuda.max_memory_allocated() + self._SPARE + self._STEP * self._STEPS
                torch.cuda.set_per_process_memory_fraction(min(1.0, held / total))
        yield

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if self._scarce and not _ON_CPU:
            size = self._STEP * (1 + next(self._sizes) % self._STEPS)
            torch.empty(size, dtype=torch.uint8, device="cuda")
        yield


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
