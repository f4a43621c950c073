"""Keeps the host from waiting for its device during a program, and counts where it waits all the same.

Stock's timers record events on the stream, which are read later. Checks of results are delayed until the program has
ended, because reading a result waits.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from megatron.core.timers import Timer, Timers

Check = Callable[[], None]

# Part of the warning with which torch reports a wait.
_WAIT = "called a synchronizing CUDA operation"
# From this level of --timing-log-level on, stock's timers measure each pass.
_PASSES = 2


class LateChecks:
    """Runs checks at once, or, during a program, at its end in the same order."""

    def __init__(self) -> None:
        self._waiting: list[Check] | None = None

    @property
    def waiting(self) -> bool:
        """True if a check would be delayed now."""
        return self._waiting is not None

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Delays checks inside the block and runs them after it, unless an error ends the block."""
        waiting: list[Check] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        for check in waiting:
            check()

    def add(self, check: Check) -> None:
        """Runs the check now or at the end of the program."""
        if self._waiting is None:
            check()
        else:
            self._waiting.append(check)


@contextmanager
def events_in(timers: Any) -> Iterator[None]:
    """Makes every timer started in the block record events, both stock's timers and the script's.

    Stock's timers synchronise the whole device at each start and stop. Under ``--timing-log-level 2`` that is twice per
    pass, so passes are measured without overlap. An event marks the same point of the stream without a wait.
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


def without_idle_timers(config: Any) -> Any:
    """Returns ``config``, or a copy without timers if they measure no pass: each pass would ask them four times."""
    timers = config.timers
    if not isinstance(timers, Timers) or timers._log_level >= _PASSES:
        return config
    config = copy(config)
    config.timers = None
    return config


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


@contextmanager
def host_waits(counts: Counter[str] | None) -> Iterator[None]:
    """Adds the waits inside the block to ``counts``, by file and line, as torch's debug mode reports them.

    Other warnings are shown after the block.

    Args:
        counts: the counts; None to count nothing. Counting needs a GPU.
    """
    if counts is None:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in shown:
        if _WAIT in str(warning.message):
            counts[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
