"""The stall watch: ends a process whose pipeline stands still, with one line that says where and, if it can, why.

Left alone such a job sits on its GPUs until a watchdog of the backend's gives up, ten minutes later and naming a
collective. A thread that sleeps nearly always looks, some dozens of times within the limit, whether the host has come
to another step (:mod:`.position`), and does no more. Only where it has not for the whole limit is the device asked how
far it is.

A rank that stands in a pass of its own speaks first: of all the others, each of which waits for somebody, it knows
best. They give it an eighth of the limit.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron.schedules.runtime.position import End, Place, Spot
from megatron.schedules.runtime.program import COLLECTIVES, RECEIVES, SENDS, Action, Op
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.utils.errors import one_line

_LOOKS, _SHORTEST_S, _LONGEST_S = 40, 0.05, 3.0
_GRACE = 1 / 8
_LAST_WORDS_S = 10.0
_STATUS = 1
# Whose frames do not say where a program stands; our own script for GPT does.
_MACHINERY = ("torch", "megatron.schedules")
_SCRIPT = "megatron.schedules.integration.gpt"


class StallWatch:
    """Watches one place, and ends the process where nothing moves there for longer than the limit.

    Args:
        place: what the engine keeps.
        limit: seconds.
        global_rank: this process's.
        advice: what a reader of the line can do, put at its end.
        in_thread: called in the watch's thread before all else. Where there is a GPU it chooses it: a thread that
            asks after another one's event takes memory for itself on the first.
        end: what is done with the line; it does not come back.
    """

    def __init__(
        self,
        place: Place,
        limit: float,
        *,
        global_rank: int,
        advice: str,
        in_thread: Callable[[], object] = lambda: None,
        end: Callable[[str], object] | None = None,
    ) -> None:
        self._place, self._limit, self._global_rank, self._advice = place, limit, global_rank, advice
        self._in_thread, self._end = in_thread, end or end_process
        self._pause = min(max(limit / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._host: Spot | None = None
        self._stood = 0.0
        self._suspect: Spot | None = None
        self._suspected_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipeline stall watch", daemon=True)

    def start(self) -> None:
        """Watch from now on, until the interpreter ends."""
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join(_LONGEST_S)
        atexit.unregister(self.close)

    def look(self, seconds: float) -> str | None:
        """The line to end with, if this is a stall.

        Args:
            seconds: since the last look.
        """
        host = self._place.spot
        if host is not self._host:
            self._host = host
            self._begin_again()
        if host is None and not self._place.device_is_behind:
            return None
        self._stood += seconds
        if self._stood < self._limit:
            return None
        with _ends_anyway():  # where the device holds a lock of the driver's, asking it may never return
            device = self._place.device()
        spot = device or host
        if spot is None:
            self._begin_again()
            return None
        # A host may stand although its device moves, which has much to do; and who waits for others lets them speak.
        if device is not None or _waits(spot):
            if self._suspect is not spot:
                self._suspect, self._suspected_at = spot, self._stood
                return None
            if self._stood - self._suspected_at < self._limit * _GRACE:
                return None
        return self._line(spot, on_device=device is not None)

    def _begin_again(self) -> None:
        self._stood, self._suspect = 0.0, None

    def _watch(self) -> None:
        self._in_thread()
        before = time.monotonic()
        while not self._closed.wait(self._pause):
            now = time.monotonic()
            # A process that was stopped meanwhile, by a debugger or a batch system, has not stood still.
            line = self.look(min(now - before, 2 * self._pause))
            before = now
            if line is not None:
                self._end(line)
                return

    def _line(self, spot: Spot, *, on_device: bool) -> str:
        program = spot.program
        who = f"pipeline rank {program.rank} of {program.placement.ranks} (global rank {self._global_rank})"
        who = f"the GPU of {who}" if on_device else who
        line = f"{who} has stood still for {self._stood:.3g} s {_where(spot)}; host {self._host_frame()}"
        return one_line(f"{Path(sys.argv[0]).name}: error: {line}; {self._advice}")

    def _host_frame(self) -> str:
        frame = sys._current_frames().get(self._place.thread)
        while frame is not None and _is_machinery(frame):
            frame = frame.f_back
        return (
            "unknown" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        )


def end_process(line: str) -> None:
    """Say ``line`` on standard error and end this process at once, whatever its other threads do."""
    with _ends_anyway():  # who reads our output may stand still too
        try:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        finally:
            os._exit(_STATUS)


@contextmanager
def _ends_anyway() -> Iterator[None]:
    """The process ends, with every thread's stack on standard error, unless this is through in some seconds.

    It needs no lock of Python's for that: what is done here may keep it.
    """
    faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _waits(spot: Spot) -> bool:
    """Whether ``spot`` is one at which another rank is waited for."""
    return isinstance(spot.step, End) or spot.awaits or spot.step.action.peer is not None


def _where(spot: Spot) -> str:
    """Where that is, what is waited for there, and what usually keeps it."""
    step, gone = spot.step, "which has died, stands still itself, or is slower than that"
    if step is End.AFTER:
        return "after its program, where all ranks exchange results and gradients: one of them does not come there"
    if step is End.SENDS:
        peers = sorted({a.peer for a in spot.program.actions if a.op in SENDS and a.peer is not None})
        to = " or ".join(map(str, peers))
        what = f"its last messages are not taken by pipeline rank {to}"
        if any(a.op in COLLECTIVES for a in spot.program.actions):
            what += ", or its last collective lacks one of all ranks"
        return f"at the end of its program: {what}, {gone}"
    action, awaited = step.action, spot.awaited
    if spot.awaits:
        who = "some pipeline rank" if awaited is None else f"pipeline rank {awaited}"
        return f"at {action}: {step.needed} has not come from {who}, {gone}"
    if action.peer is not None:
        way = "from" if action.op in RECEIVES else "to"
        return f"at {action}, a message {way} pipeline rank {action.peer}, {gone}"
    what = "takes longer than that (a first compilation, loading of data)"
    if action.op is Op.REDUCE:
        what = "starts a reduction of gradients"
    if (copies := _copies_awaited(spot, action)) is not None:
        what += f", waits for {copies}, which are slow or have stopped,"
    return f"in {action}, which {what} or waits for what does not come (a collective that not all its ranks call)"


def _copies_awaited(spot: Spot, action: Action) -> Resource | None:
    """The copies that a pass waits for itself, where it does."""
    if not isinstance(action.op, Kind) or not spot.program.offloads(action.stage, action.microbatch):
        return None
    row = KINDS[action.op]
    if row.resource is not Resource.COMPUTE:
        return row.resource if row.resource is Resource.TO_HOST else None
    resources = (KINDS[kind].resource for need in row.needs for kind in need.kinds)
    return next((resource for resource in resources if resource is not Resource.COMPUTE), None)


def _is_machinery(frame: FrameType) -> bool:
    """Whether ``frame`` is torch's, Python's own or this package's, which say little of a script."""
    name = str(frame.f_globals.get("__name__", ""))
    if name == _SCRIPT:
        return False
    return name.partition(".")[0] in sys.stdlib_module_names or any(f"{name}.".startswith(f"{m}.") for m in _MACHINERY)
