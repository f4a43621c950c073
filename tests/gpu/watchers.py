"""Watchers of passes: for waits, times, names in a profile and replanning, and one that leaves little memory."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.log.run_log import Logged, RunLog
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.planner.background import BackgroundPlan
from megatron.schedules.planner.replanning import Proposal
from megatron.schedules.programs.program import Action, Program
from megatron.schedules.runtime.recorder import Recorder
from megatron.schedules.schedule.kinds import KINDS, WHOLES, Kind, Pass, Resource
from megatron.schedules.schedule.placement import Placement
from tests.gpu.timeline import Span

_ON_CPU = standin.needed()
# A median may be off the other by so much of it, or so many milliseconds: the marks stand a little outside.
_OFF, _OFF_MS = 0.03, 0.1
_BACKWARDS = {Kind.I, *WHOLES.values()}


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


class WithStock(Spans):
    """Records its own events round each pass; a mark of the recorder that waits for the device raises."""

    def __init__(self) -> None:
        super().__init__()
        if not _ON_CPU:
            for name in ("began", "arrived", "ended", "copying"):
                setattr(Recorder, name, _strict(getattr(Recorder, name)))


def _strict(method: Callable[..., Any]) -> Callable[..., Any]:
    def strict(*args: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


def against(profile: JobProfile, ranks: Any, *, strict: bool) -> tuple[dict[str, Any], str]:
    """Compares the profile's medians with those of independent events, and checks that it is complete.

    Returns the figures and the fault. Where that is not to be ``strict``, as on a CPU that others keep busy, they may
    be as far apart as they like.
    """
    took: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    first, last = profile.iterations
    # Copies, and by the other hand's clock a backward that waits for one to come back, are of no such length.
    others = [kind for kind, row in KINDS.items() if row.resource is not Resource.COMPUTE]
    others += [] if profile.copy_gbps is None else [Kind.I, Kind.B]
    for timed in ranks:
        for spans in timed.iterations[first - 1 : last]:
            for action, began, ended in spans:
                if isinstance(action.op, Kind) and action.op not in others:
                    took[action.stage, action.op].append(1e3 * (ended - began))
    worst, fault = 0.0, "" if took else "no pass was seen by another hand"
    for (stage, kind), each in took.items():
        own, other = profile.stages[stage].median(kind), statistics.median(each)
        worst = max(worst, own / other - 1, 1 - own / other, key=abs)
        if strict and abs(own - other) > max(_OFF * other, _OFF_MS):
            fault = fault or f"{kind} of stage {stage} took {other:.3f} ms, and {own:.3f} by the profile"
    if not all(stage.held > 0 for stage in profile.stages):
        fault = fault or "no bytes were counted on some stage"
    if not profile.latencies:
        fault = fault or "no link latency was measured"
    rates = profile.copy_gbps
    figures = {"stages": len(profile.stages), "worst off by, %": 100 * worst, "message, ms": profile.comm}
    if rates is not None:
        figures |= {"copies out, GB/s": rates.to_host, "back, GB/s": rates.from_host}
    return figures, fault


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


class Replanning:
    """Records the programs of training and the log; waits for the process that plans."""

    def __init__(self) -> None:
        self._programs: list[int] = []
        self._logged: list[tuple[float, float | None]] = []
        stock, poll = RunLog.logged, BackgroundPlan.poll

        def logged(log: RunLog, counted: int) -> Logged | None:
            found = stock(log, counted)
            if found is not None:
                self._logged.append((found.measured.bubble, found.peak))
            return found

        def waited(search: BackgroundPlan) -> Proposal:
            while (found := poll(search)) is None:
                time.sleep(0.05)
            return found

        RunLog.logged, BackgroundPlan.poll = logged, waited  # type: ignore[assignment,method-assign]

    def program(self, program: Program) -> AbstractContextManager[Any]:
        if any(action.op in _BACKWARDS for action in program.actions):
            self._programs.append(hash(program.actions))
        return nullcontext()

    def action(self, action: Action) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def found(self) -> Any:
        pairs = zip(self._programs, self._programs[1:], strict=False)
        return [at for at, (was, now) in enumerate(pairs, 2) if was != now], self._logged


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


class Peak:
    """Peak memory, GiB: allocated, and reserved by the allocator and by CUDA graphs."""

    @property
    def found(self) -> tuple[float, float]:
        """Returns both."""
        return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30

    @contextmanager
    def program(self, program: Program) -> Iterator[None]:
        yield

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        yield


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
