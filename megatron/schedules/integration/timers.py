"""Stock's timers inside a program. They record events on the stream, which are read later without a wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.timers import Timer, Timers


@contextmanager
def events_in(timers: Any) -> Iterator[None]:
    """Makes every timer started in the block record events, both stock's timers and the script's.

    Stock's timers synchronise the whole device at each start and stop. Under ``--timing-log-level 2`` that is twice per
    pass, so passes are measured without overlap. An event marks the same point of the stream without a wait.

    Args:
        timers: ``config.timers``, which may be None.
    """
    if timers is None:
        yield
        return
    stock = type(timers)
    timers.__class__ = _EventTimers
    try:
        yield
    finally:
        timers.__class__ = stock


class _EventTimers(Timers):
    """Stock's group of timers; each returned timer records events."""

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        timer = super().__call__(name, log_level)
        if type(timer) is Timer and not timer._started:
            timer.__class__ = _EventTimer
            timer._spans = deque()
        return timer


class _EventTimer(Timer):
    """Stock's timer with pairs of events. It adds up completed pairs early and the rest when it is read."""

    _spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]]
    _began: torch.cuda.Event
    _started: bool

    def start(self, barrier: bool = False) -> None:
        assert not self._started, "timer has already been started"
        if barrier:
            torch.distributed.barrier(group=self._barrier_group)
        self._began, self._started = _now(), True

    def stop(self, barrier: bool = False) -> None:
        assert self._started, "timer is not started"
        if barrier:
            torch.distributed.barrier(group=self._barrier_group)
        self._spans.append((self._began, _now()))
        self._started = False
        while self._spans and self._spans[0][1].query():
            self._add(*self._spans.popleft())

    def reset(self) -> None:
        self._add_all()
        super().reset()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        going = self._started
        if going:
            self.stop(barrier=barrier)
        self._add_all()
        elapsed = float(super().elapsed(reset=reset, barrier=barrier))
        if going:
            self.start(barrier=barrier)
        return elapsed

    def active_time(self) -> float:
        self._add_all()
        return float(super().active_time())

    def _add_all(self) -> None:
        if self._spans:
            self._spans[-1][1].synchronize()
        while self._spans:
            self._add(*self._spans.popleft())

    def _add(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        seconds = began.elapsed_time(ended) / 1000
        self._elapsed += seconds
        self._active_time += seconds


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
