"""Where a rank stands in its program: noted by the engine at next to no cost, read by whoever watches it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from megatron.schedules.runtime.program import Instruction, Program, computes


class Mark(Protocol):
    """A point in what the device has been given to do, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has come to it; does not wait."""
        ...


class End(Enum):
    """What comes after a program's last instruction."""

    SENDS = "its sends and collectives are waited for"
    AFTER = "what follows a program is under way"


class Spot(NamedTuple):
    """One step of one run: every time that a host comes to a step it makes a spot of its own.

    Args:
        program: what is run.
        step: an instruction of it, or what comes after the last.
        arrived: whether what the instruction needs from other ranks is no longer waited for.
    """

    program: Program
    step: Instruction | End
    arrived: bool = False

    @property
    def awaits(self) -> bool:
        """Whether a message, or what a collective brings, is still waited for."""
        return not self.arrived and not isinstance(self.step, End) and self.program.arrives(self.step)

    @property
    def awaited(self) -> int | None:
        """The pipeline rank from which that comes, where it is one."""
        return None if self.arrived or isinstance(self.step, End) else self.program.sender(self.step)


class Place:
    """Where the host stands, and how far the device has come, which may be behind.

    Args:
        mark: marks the point at which the device's current stream is; None where the host does all computing.
    """

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        self.spot: Spot | None = None
        """The host's; None where no program is under way."""
        self.thread = 0
        """The thread that carries the program out."""
        self._program: Program
        self._mark = mark
        self._ahead: deque[tuple[Spot, Mark]] = deque()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A program, and what follows it, is under way until this is left; after an error nothing is."""
        try:
            yield
            self._leave(self.spot)
        except BaseException:
            self._ahead = deque()
            raise
        finally:
            self.spot = None

    def begin(self, program: Program) -> None:
        """This thread is about to carry out ``program``."""
        self._program, self.thread = program, threading.get_ident()

    def reach(self, step: Instruction | End) -> None:
        """The host begins with ``step``."""
        left, self.spot = self.spot, Spot(self._program, step)
        if self._mark is not None:
            self._leave(left)

    def arrived(self) -> None:
        """What the instruction needs from another rank is there; on a GPU for what the stream does next."""
        left = self.spot
        assert left is not None
        self.spot = left._replace(arrived=True)
        if self._mark is not None:
            self._leave(left)

    def device(self) -> Spot | None:
        """The first spot that the device has not left, though the host has."""
        return next((spot for spot, mark in self._ahead.copy() if not _passed(mark)), None)

    @property
    def device_is_behind(self) -> bool:
        """Whether the device had something left to do when the host last looked, told without asking it."""
        return bool(self._ahead)

    def _leave(self, spot: Spot | None) -> None:
        """Mark where the device leaves ``spot``, unless nothing is computed there; forget what it has left."""
        if self._mark is None or spot is None:
            return
        if isinstance(spot.step, End) or computes(spot.step.action.op):
            self._ahead.append((spot, self._mark()))
            while self._ahead and self._ahead[0][1].query():
                self._ahead.popleft()


def _passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device failed: the host will hear of it
        return True
