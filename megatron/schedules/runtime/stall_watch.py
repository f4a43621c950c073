"""The stall watch: ends a process whose pipeline has stalled, with one line that says where and, if it can, why.

Otherwise such a job would hold its GPUs until a watchdog of the backend gives up, ten minutes later, and names a
collective. A thread looks, some dozens of times within the limit, whether the host has reached another step
(:mod:`.position`); only where it has not for the whole limit does it ask the device. A rank that stalls in a pass of
its own reports first: all others wait for somebody, and wait another eighth of the limit before they report.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron.schedules.programs.program import COLLECTIVES, RECEIVES, SENDS, Op
from megatron.schedules.runtime.position import End, Position, PositionTracker
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.utils.errors import one_line

_LOOKS, _SHORTEST_S, _LONGEST_S = 40, 0.05, 3.0
_GRACE = 1 / 8
# The first program compiles kernels and loads them, perhaps from a shared file system: so many times the limit.
_FIRST = 4
_LAST_WORDS_S = 10.0
_STATUS = 1
# Frames of these do not locate a stall.
_MACHINERY = ("torch", "megatron.schedules")


class StallWatch:
    """Ends the process if the position does not change within the limit.

    Args:
        tracker: what the engine updates.
        limit: seconds; four times as many until the first program has ended.
        global_rank: this process's.
        advice: what a reader of the line can do, put at its end.
        scripts: modules of this package whose frames locate a stall, as those of a user's script do.
        in_thread: called first in the watch's thread. Where there is a GPU it selects it: a thread that queries an
            event of another GPU allocates memory on the first.
        end: called with the line; does not return.
    """

    def __init__(
        self,
        tracker: PositionTracker,
        limit: float,
        *,
        global_rank: int,
        advice: str,
        scripts: Collection[str] = (),
        in_thread: Callable[[], object] = lambda: None,
        end: Callable[[str], object] | None = None,
    ) -> None:
        self._tracker, self._limit, self._global_rank, self._advice = tracker, limit, global_rank, advice
        self._in_thread, self._end, self._scripts = in_thread, end or end_process, scripts
        self._pause = min(max(limit / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._seen = 0
        self._stalled = 0.0
        self._suspect: int | None = None
        self._suspected_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipeline stall watch", daemon=True)

    def start(self) -> None:
        """Starts watching, until the interpreter ends."""
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join(_LONGEST_S)
        atexit.unregister(self.close)

    def look(self, seconds: float) -> str | None:
        """Returns the line to end with if the pipeline has stalled.

        Args:
            seconds: since the last look.
        """
        if self._tracker.number != self._seen:
            self._seen = self._tracker.number
            self._reset()
        host = self._tracker.host
        if host is None and not self._tracker.device_is_behind:
            return None
        self._stalled += seconds
        limit = self._limit if self._tracker.warm else _FIRST * self._limit
        if self._stalled < limit:
            return None
        with _ends_anyway():  # the call may not return where the device holds a lock of the driver
            device = self._tracker.device()
        position = device or host
        if position is None:
            self._reset()
            return None
        # The host may wait although its device makes progress; and a rank that waits for others lets them report first.
        if device is not None or _waits(position):
            if self._suspect != position.number:
                self._suspect, self._suspected_at = position.number, self._stalled
                return None
            if self._stalled - self._suspected_at < limit * _GRACE:
                return None
        return self._line(position, on_device=device is not None)

    def _reset(self) -> None:
        self._stalled, self._suspect = 0.0, None

    def _watch(self) -> None:
        self._in_thread()
        before = time.monotonic()
        while not self._closed.wait(self._pause):
            now = time.monotonic()
            # Time in which a debugger or a batch system has stopped the process does not count.
            line = self.look(min(now - before, 2 * self._pause))
            before = now
            if line is not None:
                self._end(line)
                return

    def _line(self, position: Position, *, on_device: bool) -> str:
        program = position.program
        who = f"pipeline rank {program.rank} of {program.placement.ranks} (global rank {self._global_rank})"
        who = f"the GPU of {who}" if on_device else who
        line = f"{who} has stalled for {self._stalled:.3g} s {_where(position)}; host {self._host_frame()}"
        return one_line(f"{Path(sys.argv[0]).name}: error: {line}; {self._advice}")

    def _host_frame(self) -> str:
        frame = sys._current_frames().get(self._tracker.thread)
        while frame is not None and _is_machinery(frame, self._scripts):
            frame = frame.f_back
        return (
            "unknown" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        )


def end_process(line: str) -> None:
    """Prints ``line`` on standard error and ends this process at once, whatever its other threads do."""
    with _ends_anyway():  # the reader of our output may have stalled too
        try:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        finally:
            os._exit(_STATUS)


@contextmanager
def _ends_anyway() -> Iterator[None]:
    """Ends the process, with every thread's stack on standard error, unless the body ends within seconds.

    This needs no lock of Python's, which the body may hold.
    """
    faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _waits(position: Position) -> bool:
    """Returns true if the rank waits for another rank there."""
    return isinstance(position.step, End) or position.awaits or position.step.action.peer is not None


def _where(position: Position) -> str:
    """Describes the position, what the rank waits for there, and the usual cause."""
    step, cause = position.step, "which has died, has stalled itself, or is slower than that"
    if step is End.AFTER:
        return "after its program, where all ranks exchange results and gradients: one of them does not get there"
    if step is End.SENDS:
        peers = sorted({a.peer for a in position.program.actions if a.op in SENDS and a.peer is not None})
        what = f"its last messages are not received by pipeline rank {' or '.join(map(str, peers))}"
        if any(a.op in COLLECTIVES for a in position.program.actions):
            what += ", or a rank has not joined its last collective"
        return f"at the end of its program: {what}, {cause}"
    action, awaited = step.action, position.awaited
    if position.awaits:
        who = "some pipeline rank" if awaited is None else f"pipeline rank {awaited}"
        return f"at {action}: {step.needed} has not come from {who}, {cause}"
    if action.peer is not None:
        way = "from" if action.op in RECEIVES else "to"
        return f"at {action}, a message {way} pipeline rank {action.peer}, {cause}"
    what = "takes longer than that (a first compilation, loading of data)"
    if action.op is Op.REDUCE:
        what = "starts a reduction of gradients"
    if isinstance(action.op, Kind) and position.program.offloads(action.stage, action.microbatch):
        row = KINDS[action.op]
        waited = [KINDS[kind].resource for need in row.needs for kind in need.kinds]
        copies = [r for r in (row.resource, *waited) if r is not Resource.COMPUTE]
        if copies and row.resource is not Resource.FROM_HOST:
            what += f", waits for {copies[0]}, which are slow or have stopped,"
    return f"in {action}, which {what} or waits for what does not come (a collective that not all its ranks call)"


def _is_machinery(frame: FrameType, scripts: Collection[str]) -> bool:
    """Returns true if ``frame`` is of torch, Python or this package, and so does not locate the stall in a script."""
    name = str(frame.f_globals.get("__name__", ""))
    if name in scripts:
        return False
    return name.partition(".")[0] in sys.stdlib_module_names or any(f"{name}.".startswith(f"{m}.") for m in _MACHINERY)
