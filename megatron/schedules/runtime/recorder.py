"""Records when passes began and ended on the device, without ever waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from megatron.schedules.runtime.program import Action
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource, using
from megatron.schedules.schedule.passes import Pass

# A copy to the host begins with the end of the pass that it needs.
_COPIED_BY = {need.kinds[0]: kind for kind in using(Resource.TO_HOST) for need in KINDS[kind].needs}


class Clock(Protocol):
    """Marks moments of what computes."""

    def mark(self) -> Any:
        """This moment: for a device, that at which it has done all that it has been given so far."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether that moment lies behind the device; does not wait."""
        ...

    def between(self, earlier: Any, later: Any) -> float:
        """Milliseconds from one passed mark to another."""
        ...

    def reuse(self, marks: list[Any]) -> None:
        """Nobody looks at ``marks`` any more."""
        ...


class HostClock:
    """That of a CPU which does the computing itself."""

    def mark(self) -> float:
        """See :meth:`Clock.mark`."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """See :meth:`Clock.passed`."""
        return True

    def between(self, earlier: float, later: float) -> float:
        """See :meth:`Clock.between`."""
        return 1e3 * (later - earlier)

    def reuse(self, marks: list[float]) -> None:
        """See :meth:`Clock.reuse`."""


class StreamClock:
    """That of a GPU: events on its current stream, made once and used again."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Clock.mark`."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """See :meth:`Clock.passed`."""
        return bool(mark.query())

    def between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """See :meth:`Clock.between`."""
        return float(earlier.elapsed_time(later))

    def reuse(self, marks: list[torch.cuda.Event]) -> None:
        """See :meth:`Clock.reuse`."""
        self._free += marks


class Span(NamedTuple):
    """One pass as it happened: from when until when, in milliseconds since the record began."""

    work: Pass
    start: float
    end: float


class _Copying(NamedTuple):
    """A copy, and the marks of its begin and end once it has come so far."""

    work: Pass
    marks: list[Any]


class Recorder:
    """An engine's observer (see :class:`.engine.Observer`) that notes each pass, once what it waited for had come.

    Use it for one run after another: :meth:`begin`, the run, and whenever the device has come so far :meth:`take`.

    Args:
        clock: of what computes.

    Attributes:
        copies: of the run that was taken last, from when until when its copies were carried out beside the computing,
            in the order in which they were begun; those only that :meth:`copying` was told of.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._works: list[Pass] = []
        self._marks: list[Any] = []
        self._at: Pass | None = None
        self._open = False
        self._copying: list[_Copying] = []
        self._whole: deque[tuple[list[Pass], list[Any], list[_Copying]]] = deque()
        self.copies: list[Span] = []

    def begin(self) -> None:
        """A run begins: time 0 of its record. What an unfinished run left is dropped."""
        self._clock.reuse([*self._marks, *(mark for each in self._copying for mark in each.marks)])
        self._works, self._marks, self._open = [], [self._clock.mark()], False
        self._copying = []

    def copying(self) -> Callable[[], None]:
        """See :class:`.copies.CopyWatch`: copies are begun by the pass that is under way.

        That of an O begins with the end of its F, where computing has not come to O yet.
        """
        assert self._at is not None
        stage, kind, m = self._at
        copying = _Copying(Pass(stage, _COPIED_BY.get(kind, kind), m), [])
        self._copying.append(copying)
        return lambda: copying.marks.append(self._clock.mark())

    def began(self, action: Action) -> None:
        """The host begins to carry out ``action``."""
        op, stage, microbatch, _ = action
        self._open = isinstance(op, Kind)
        if isinstance(op, Kind):
            self._at = Pass(stage, op, microbatch)
            self._works.append(self._at)
            self._marks.append(self._clock.mark())

    def arrived(self) -> None:
        """What the pass needs is there: from now on it computes."""
        if self._open:
            self._clock.reuse([self._marks.pop()])
            self._marks.append(self._clock.mark())

    def ended(self, action: Action) -> None:
        """The host has given the device all of ``action``."""
        if self._open:
            self._marks.append(self._clock.mark())
            self._open = False

    def end(self) -> None:
        """The run has ended well."""
        self._whole.append((self._works, self._marks, self._copying))
        self._works, self._marks, self._copying = [], [], []

    def take(self) -> list[Span] | None:
        """The passes of the oldest run that has not been taken; None where the device is still in it, or there is none.

        The passes come in the order of the program; of a copy both times are those at which computing came past it.
        """
        if not self._whole or not self._clock.passed(self._whole[0][1][-1]):
            return None
        works, (base, *marks), copying = self._whole.popleft()
        times = [self._clock.between(base, mark) for mark in marks]
        # Computing has waited for the end of each copy, so these are passed too.
        self.copies = [Span(each.work, *(self._clock.between(base, mark) for mark in each.marks)) for each in copying]
        self._clock.reuse([base, *marks, *(mark for each in copying for mark in each.marks)])
        return [Span(*each) for each in zip(works, times[::2], times[1::2], strict=True)]
