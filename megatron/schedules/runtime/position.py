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

# Steps that the device takes part in. A send may make it wait for an earlier one.
_ON_DEVICE = frozenset(op for op in (*Kind, *Op) if computes(op) or op in SENDS)


class End(Enum):
    """The steps after a program's last instruction."""

    SENDS = "waits for its sends and collectives"
    AFTER = "exchanges results and gradients with other ranks"


class Position(NamedTuple):
    """One step of one run. Each step that the host reaches makes a new object.

    Args:
        program: what is run.
        step: an instruction of it, or what comes after the last.
        arrived: whether the step has received what it needs from other ranks.
    """

    program: Program
    step: Instruction | End
    arrived: bool = False

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
        host: the host's position; None where no program is running.
        thread: the thread that runs the program.
        warm: whether a program has run to its end, so that kernels are compiled and loaded.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.host: Position | None = None
        self.thread = 0
        self.warm = False
        self._program: Program
        self._mark = mark
        self._ahead: deque[tuple[Position, Any]] = deque()

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
            self._leave(self.host)
            self.warm = True
        except BaseException:
            self._ahead = deque()
            raise
        finally:
            self.host, self._mark = None, mark

    def begin(self, program: Program) -> None:
        """This thread is about to run ``program``."""
        self._program, self.thread = program, threading.get_ident()

    def reach(self, step: Instruction | End) -> None:
        """The host begins with ``step``."""
        left, self.host = self.host, Position(self._program, step)
        if self._mark is not None:
            self._leave(left)

    def arrived(self) -> None:
        """The step has received what it needs from other ranks; on a GPU this holds for what the stream does next."""
        left = self.host
        assert left is not None
        self.host = Position(left.program, left.step, arrived=True)
        if self._mark is not None:
            self._leave(left)

    def device(self) -> Position | None:
        """Returns the first position that the host has left and the device has not."""
        return next((position for position, mark in self._ahead.copy() if not _passed(mark)), None)

    @property
    def device_is_behind(self) -> bool:
        """True if the device had work left when the host last looked. The device is not asked."""
        return bool(self._ahead)

    def _leave(self, position: Position | None) -> None:
        """Marks where the device leaves ``position``, if the device computes there; drops marks that it has passed."""
        if self._mark is None or position is None:
            return
        step = position.step
        if isinstance(step, End) or step.action.op in _ON_DEVICE:
            self._ahead.append((position, self._mark()))
            while self._ahead and self._ahead[0][1].query():
                self._ahead.popleft()


def _passed(mark: Any) -> bool:
    try:
        return bool(mark.query())
    except RuntimeError:  # the device failed: the host will get the error
        return True
