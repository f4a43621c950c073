"""The position of a rank in its program: updated by the engine at next to no cost, read by the stall watch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import itemgetter
from typing import NamedTuple, Protocol

from megatron.schedules.programs.program import SENDS, Instruction, Op, Program, computes
from megatron.schedules.schedule.kinds import Kind

# Steps that the device takes part in. A send may make it wait for an earlier one.
_ON_DEVICE = frozenset(op for op in (*Kind, *Op) if computes(op) or op in SENDS)


class End(Enum):
    """The steps after a program's last instruction."""

    SENDS = "waits for its sends and collectives"
    AFTER = "exchanges results and gradients with other ranks"


class Position(NamedTuple):
    """One step of one run.

    Args:
        run: counts the runs of a process.
        program: what is run.
        step: an instruction of it, or what comes after the last.
        arrived: whether the step has received what it needs from other ranks.
    """

    run: int
    program: Program
    step: Instruction | End
    arrived: bool

    @property
    def awaits(self) -> bool:
        """True while the step waits for a message or for the result of a collective."""
        return not self.arrived and not isinstance(self.step, End) and self.program.arrives(self.step)

    @property
    def awaited(self) -> int | None:
        """The pipeline rank that the step waits for, where it is a single one."""
        return None if self.arrived or isinstance(self.step, End) else self.program.sender(self.step)


class Mark(Protocol):
    """An event of the device."""

    def record(self) -> object:
        """Puts the event on the device's current stream, behind all that is queued there."""

    def query(self) -> bool:
        """Returns whether the device has reached the event."""


class _Run(NamedTuple):
    """One run, and the positions in it that the host has left: their step, whether it had arrived, and the mark behind.

    Only positions at which the device has something to do are noted.
    """

    number: int
    program: Program
    left: list[tuple[Instruction | End, bool, Mark]]


class PositionTracker:
    """Position of the host, and of the device, which may be behind.

    Args:
        new_mark: makes an event; None where the host computes. The events of a run are used again when the device has
            left it.

    Attributes:
        thread: the thread that runs the program.
        warm: whether a program has run to its end, so that kernels are compiled and loaded.
    """

    def __init__(self, new_mark: Callable[[], Mark] | None = None) -> None:
        self.thread, self.warm = 0, False
        self._run: _Run
        self._runs = 0
        self._step: Instruction | End | None = None
        self._arrived = False
        self._new_mark = new_mark
        self._behind: deque[_Run] = deque()  # runs that the device may not have left
        self._unused: list[Mark] = []

    @property
    def progress(self) -> object:
        """Differs from what it was if the host has moved."""
        return self._runs, self._step, self._arrived

    @property
    def host(self) -> Position | None:
        """The host's position; None where no program is running."""
        step = self._step
        return None if step is None else Position(self._run.number, self._run.program, step, self._arrived)

    @contextmanager
    def running(self, *, marked: bool = True) -> Iterator[None]:
        """Tracks a program and what follows it. After an error, forgets what the device has left to do.

        ``marked`` is False if no event may be asked for, as in the capture of a CUDA graph. Then only the host is
        tracked.
        """
        new_mark = self._new_mark
        self._new_mark = new_mark if marked else None
        try:
            yield
            if self._new_mark is not None:
                self._leave(self._new_mark)
                self._drop_passed()
            self.warm = True
        except BaseException:
            self._behind = deque()
            raise
        finally:
            self._step, self._new_mark = None, new_mark

    def begin(self, program: Program) -> None:
        """This thread is about to run ``program``."""
        self.thread = threading.get_ident()
        self._runs += 1
        self._run = _Run(self._runs, program, [])
        if self._new_mark is not None:
            self._drop_passed()
            self._behind.append(self._run)

    def reach(self, step: Instruction | End) -> None:
        """The host begins with ``step``."""
        if self._new_mark is not None:
            self._leave(self._new_mark)
        self._step, self._arrived = step, False

    def arrived(self) -> None:
        """The step has received what it needs from other ranks; on a GPU this holds for what the stream does next."""
        if self._new_mark is not None:
            self._leave(self._new_mark)
        self._arrived = True

    def device(self) -> Position | None:
        """Returns the first position that the host has left and the device has not."""
        for number, program, left in self._behind.copy():
            for step, arrived, mark in left:
                if not _passed(mark):
                    return Position(number, program, step, arrived)
        return None

    @property
    def device_is_behind(self) -> bool:
        """True if the device had work left when the host last looked. The device is not asked."""
        return bool(self._behind)

    def _leave(self, new_mark: Callable[[], Mark]) -> None:
        """Marks where the device leaves the host's position, if the device computes there."""
        step = self._step
        if step is not None and (isinstance(step, End) or step.action.op in _ON_DEVICE):
            mark = self._unused.pop() if self._unused else new_mark()
            mark.record()
            self._run.left.append((step, self._arrived, mark))

    def _drop_passed(self) -> None:
        """Drops the runs that the device has left."""
        behind = self._behind
        while behind and (not behind[0].left or behind[0].left[-1][-1].query()):
            self._unused.extend(map(itemgetter(-1), behind.popleft().left))


def _passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device failed: the host will get the error
        return True
