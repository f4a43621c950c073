"""A daemon thread that runs calls one after another, in the order in which they were submitted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class BackgroundThread:
    """Runs calls in one thread, which starts with the first call and ends with :meth:`close` or with this object.

    Unlike threads of ``concurrent.futures``, it does not keep the process alive if a call never returns.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls | None = None
        self._thread: threading.Thread | None = None

    def submit[Result](self, call: Callable[[], Result]) -> Future[Result]:
        """Runs ``call`` after those submitted before it; returns at once."""
        if self._calls is None:
            self._calls = SimpleQueue()
            self._thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Waits until all calls have returned, and ends the thread; the next call starts another."""
        if self._calls is not None and self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._calls = self._thread = None


def _run(calls: _Calls) -> None:
    while (submitted := calls.get()) is not None:
        future, call = submitted
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del submitted, future, call  # nothing of a call is kept while there is nothing to do
