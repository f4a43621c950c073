"""Observers of passes: when they began and ended on the device, their change of memory, and named ranges for profilers.

None of them waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.schedules.programs.program import Action
from megatron.schedules.runtime.engine import Observer
from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, Resource, using

# A copy to the host begins with the end of the pass that it needs.
_COPIED_BY = {need.kinds[0]: kind for kind in using(Resource.TO_HOST) for need in KINDS[kind].needs}


class HostEvent:
    """A ``torch.cuda.Event`` for a CPU that does the computing itself."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        """Marks this moment."""
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Returns true once that moment is past."""
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds until ``later``."""
        return 1e3 * (later._seconds - self._seconds)


class HostClock:
    """The clock of a CPU that does the computing itself."""

    def event(self) -> HostEvent:
        """Makes an event."""
        return HostEvent()


class StreamClock:
    """The clock of a GPU: events on its current stream."""

    def event(self) -> torch.cuda.Event:
        """Makes an event."""
        return torch.cuda.Event(enable_timing=True)


class Span(NamedTuple):
    """When one pass ran: start and end in milliseconds since the record began."""

    work: Pass
    start: float
    end: float


class MessageTimes(NamedTuple):
    """A message inside a pass: milliseconds of weight gradients behind it, and of waiting after these."""

    work: Pass
    behind: float
    exposed: float


class _Marked(NamedTuple):
    """A copy with the marks of its start and end, or a message with three, as far as it has come."""

    work: Pass
    marks: list[Any]


class _Run(NamedTuple):
    """One run: its passes; the marks of its start and of each pass's start and end; its copies and messages."""

    works: list[Pass]
    marks: list[Any]
    copies: list[_Marked]
    messages: list[_Marked]

    def all_marks(self) -> list[Any]:
        """The marks of passes, copies and messages."""
        return [*self.marks, *(mark for timed in (*self.copies, *self.messages) for mark in timed.marks)]


class Recorder(Observer):
    """Notes when each pass began, once its inputs had arrived, and when it ended.

    For each run call :meth:`begin`, run, call :meth:`end`, and call :meth:`take` once the device has finished.

    Args:
        clock: makes events, which are used again.

    Attributes:
        copies: start and end of each copy of the run that was taken last, in the order in which they began.
        messages: the messages inside passes of that run, in order.
    """

    def __init__(self, clock: HostClock | StreamClock) -> None:
        self._clock = clock
        self._free: list[Any] = []
        self._run = _Run([], [], [], [])
        self._current: Pass | None = None
        self._open = False
        self._whole: deque[_Run] = deque()
        self.copies: list[Span] = []
        self.messages: list[MessageTimes] = []

    def begin(self) -> None:
        """Begins a run at time 0. Drops an unfinished run."""
        self._free += self._run.all_marks()
        self._run, self._open = _Run([], [self._mark()], [], []), False

    def copying(self) -> Callable[[], None]:
        """See :class:`.copies.CopyWatch`: the current pass begins a copy; that of an O begins at the end of its F."""
        assert self._current is not None
        stage, kind, m = self._current
        copy = _Marked(Pass(stage, _COPIED_BY.get(kind, kind), m), [])
        self._run.copies.append(copy)
        return lambda: copy.marks.append(self._mark())

    def message(self) -> Callable[[], None]:
        """A message starts inside the current pass.

        Returns:
            Call it twice: when weight gradients behind the message have been computed, and when it has arrived.
        """
        assert self._current is not None
        message = _Marked(self._current, [self._mark()])
        self._run.messages.append(message)
        return lambda: message.marks.append(self._mark())

    def began(self, action: Action) -> None:
        op, stage, microbatch, _ = action
        self._open = isinstance(op, Kind)
        if isinstance(op, Kind):
            self._current = Pass(stage, op, microbatch)
            self._run.works.append(self._current)
            self._run.marks.append(self._mark())

    def arrived(self) -> None:
        if self._open:
            self._run.marks[-1].record()

    def ended(self, action: Action) -> None:
        if self._open:
            self._run.marks.append(self._mark())
            self._open = False

    def end(self) -> None:
        """Ends a run that succeeded."""
        self._whole.append(self._run)
        self._run = _Run([], [], [], [])

    def take(self) -> list[Span] | None:
        """Returns the passes of the oldest run that has not been taken; None where the device has not ended it.

        Passes are in program order. Both times of a copy are when computing continued after it.
        """
        if not self._whole or not self._whole[0].marks[-1].query():
            return None
        run = self._whole.popleft()
        base, *marks = run.marks
        times = [base.elapsed_time(mark) for mark in marks]
        # Computing has waited for the end of each copy, so these marks are passed too.
        self.copies = [Span(copy.work, *(base.elapsed_time(mark) for mark in copy.marks)) for copy in run.copies]
        self.messages = [
            MessageTimes(work, begun.elapsed_time(computed), computed.elapsed_time(arrived))
            for work, (begun, computed, arrived) in run.messages
        ]
        self._free += run.all_marks()
        return [Span(*fields) for fields in zip(run.works, times[::2], times[1::2], strict=True)]

    def _mark(self) -> Any:
        try:
            event: Any = self._free.pop()
        except IndexError:  # threads that copy take marks too
            event = self._clock.event()
        event.record()
        return event


class ProfilerRanges(Observer):
    """Names every action for torch's profiler, and on a GPU for those that read NVTX ranges.

    Costs some microseconds an action: it is there only while somebody profiles.
    """

    def __init__(self) -> None:
        self._nvtx = torch.cuda.nvtx if torch.cuda.is_available() else None
        self._open: torch.profiler.record_function | None = None

    def began(self, action: Action) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(str(action))
        self._open = torch.profiler.record_function(str(action))
        self._open.__enter__()

    def ended(self, action: Action) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if self._nvtx is not None:
            self._nvtx.range_pop()


class ByteCounter(Observer):
    """Compares the bytes in use before and after each pass.

    Args:
        held: returns the bytes in use now, as the host knows them: from an allocator or a meter. Must not wait.

    Attributes:
        changes: each pass of the run, in order, and the bytes in use after it less those before it.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        self._held, self._before = held, 0
        self.changes: list[tuple[Pass, float]] = []

    def began(self, action: Action) -> None:
        self._before = self._held()

    def ended(self, action: Action) -> None:
        op, stage, microbatch, _ = action
        if isinstance(op, Kind):
            self.changes.append((Pass(stage, op, microbatch), float(self._held() - self._before)))
