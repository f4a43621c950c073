"""The position of a rank in its program: updated by the engine at next to no cost, read by the stall watch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from megatron.schedules.programs.program import SENDS, Instruction, Op, Program, computes
from megatron.schedules.schedule.kinds import Kind

# So many marks may wait before the host asks the device for the oldest.
_MARKS = 16
# Steps that the device takes part in. A send may make it wait for an earlier one.
_ON_DEVICE = frozenset(op for op in (*Kind, *Op) if computes(op) or op in SENDS)


class End(Enum):
    """The steps after a program's last instruction."""

    SENDS = "waits for its sends and collectives"
    AFTER = "exchanges results and gradients with other ranks"


class Position(NamedTuple):
    """One step of one run.

    Args:
        number: counts the positions of a process.
        program: what is run.
        step: an instruction of it, or what comes after the last.
        arrived: whether the step has received what it needs from other ranks.
    """

    number: int
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


class PositionTracker:
    """Position of the host, and of the device, which may be behind.

    Args:
        mark: records an event on the device's current stream, whose ``query`` tells whether the device has reached it;
            None where the host computes.

    Attributes:
        number: counts the positions of the host, also those between programs.
        thread: the thread that runs the program.
        warm: whether a program has run to its end, so that kernels are compiled and loaded.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.number = self.thread = 0
        self.warm = False
        self._program: Program
        self._step: Instruction | End | None = None
        self._arrived = False
        self._mark = mark
        # The fields of positions that the device may not have left, each with the mark behind it.
        self._ahead: deque[tuple[int, Program, Instruction | End, bool, Any]] = deque()

    @property
    def host(self) -> Position | None:
        """The host's position; None where no program is running."""
        step = self._step
        return None if step is None else Position(self.number, self._program, step, self._arrived)

    @contextmanager
    def running(self, *, marked: bool = True) -> Iterator[None]:
        """Tracks a program and what follows it. After an error, forgets what the device has left to do.

        ``marked`` is False if no event may be asked for, as in the capture of a CUDA graph. Then only the host is
        tracked.
        """
        mark = self._mark
        self._mark = mark if marked else None
        try:
            yield
            if self._mark is not None:
                self._leave(self._mark)
                self._drop_passed()
            self.warm = True
        except BaseException:
            self._ahead = deque()
            raise
        finally:
            self._step, self._mark = None, mark
            self.number += 1

    def begin(self, program: Program) -> None:
        """This thread is about to run ``program``."""
        self._program, self.thread = program, threading.get_ident()

    def reach(self, step: Instruction | End) -> None:
        """The host begins with ``step``."""
        if self._mark is not None:
            self._leave(self._mark)
        self._step, self._arrived = step, False
        self.number += 1

    def arrived(self) -> None:
        """The step has received what it needs from other ranks; on a GPU this holds for what the stream does next."""
        if self._mark is not None:
            self._leave(self._mark)
        self._arrived = True
        self.number += 1

    def device(self) -> Position | None:
        """Returns the first position that the host has left and the device has not."""
        for number, program, step, arrived, mark in self._ahead.copy():
            if not _passed(mark):
                return Position(number, program, step, arrived)
        return None

    @property
    def device_is_behind(self) -> bool:
        """True if the device had work left when the host last looked. The device is not asked."""
        return bool(self._ahead)

    def _leave(self, mark: Callable[[], Any]) -> None:
        """Marks where the device leaves the host's position, if the device computes there."""
        step = self._step
        if step is not None and (isinstance(step, End) or step.action.op in _ON_DEVICE):
            self._ahead.append((self.number, self._program, step, self._arrived, mark()))
            if len(self._ahead) > _MARKS:
                self._drop_passed()

    def _drop_passed(self) -> None:
        """Drops the marks that the device has passed."""
        ahead = self._ahead
        while ahead and ahead[0][-1].query():
            ahead.popleft()


def _passed(mark: Any) -> bool:
    try:
        return bool(mark.query())
    except RuntimeError:  # the device failed: the host will get the error
        return True
