"""Lets objects run the backwards of user code, whichever of torch's functions it calls.

torch has no public way to see them: what is replaced is what autograd.grad, autograd.backward and Tensor.backward all
call, however they were imported.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.autograd import graph

engine = graph._engine_run_backward
"""What torch's functions call."""


class Runner(Protocol):
    """Runs backwards in its passes.

    Attributes:
        passes: how many passes run now.
        thread: whose backwards it may run.
    """

    passes: int
    thread: int | None

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward in place of :data:`engine`, with the same parameters."""


# Each with its thread.
_seeing: list[tuple[int, Runner]] = []
_lock = threading.Lock()


class Seeing:
    """Lets a runner see every backward of the process meanwhile."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._entry, self._outer = (thread, self._runner), self._runner.thread
        self._runner.thread = thread
        with _lock:
            _seeing.append(self._entry)
            torch.autograd._engine_run_backward = _run_backward

    def __exit__(self, *_: object) -> None:
        self._runner.thread = self._outer
        with _lock:
            _seeing.remove(self._entry)
            if not _seeing:
                torch.autograd._engine_run_backward = engine


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Runs a backward by the runner of its thread.

    A device's backward has threads of autograd's own, which run for the passes of any thread. A thread of Python's
    without passes has nothing to do with those of others.
    """
    running = [(thread, runner) for thread, runner in list(_seeing) if runner.passes]
    own = [runner for thread, runner in running if thread == threading.get_ident()]
    if running and not own and isinstance(threading.current_thread(), threading._DummyThread):
        own = [runner for _, runner in running]
    return own[-1].run_backward(*args, **kwargs) if own else engine(*args, **kwargs)
