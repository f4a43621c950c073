"""Collectives of a pipeline: chains of calls that run one after another while the rank goes on computing.

A chain is a function without arguments. It makes calls that wait for other ranks (``torch.distributed``'s own, in a
group of the whole pipeline) and computes a little between them. All ranks post theirs in one order. Autograd records
nothing of a chain.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.schedules.runtime.background_thread import BackgroundThread
from megatron.schedules.runtime.stall_watch import end_process
from megatron.schedules.utils.errors import one_line

Chain = Callable[[], Tensor | None]


class Pending(Protocol):
    """A receive or a collective that was posted."""

    def wait(self) -> Tensor:
        """Waits for the tensor and returns it. Called once.

        On a GPU the tensor may still be arriving. Later work on the current stream waits for it.

        Raises:
            RuntimeError: the chain returned nothing.
            Exception: what the chain raised, or one before it.
        """
        ...


class CollectiveRunner(Protocol):
    """Runs chains, first in first out."""

    def post(self, chain: Chain) -> Pending:
        """Runs ``chain`` after all before it; returns without waiting for other ranks."""
        ...

    def finish(self) -> None:
        """Waits until all chains have run; raises what one raised."""
        ...


def collectives_on(device: torch.device) -> CollectiveRunner:
    """Returns a runner for chains that compute on ``device``."""
    return SideStream(device) if device.type == "cuda" else Worker()


class Worker(CollectiveRunner):
    """Runs chains in a thread, which exists from the first chain until :meth:`finish`.

    After a chain has raised, no other chain runs, because ranks would then join different collectives. The next wait
    raises the error. If none comes in time, because the program waits for ranks that wait for this one, the process
    ends. Thread-local settings of the caller, such as torch's modes, do not apply to chains.

    Args:
        patience: seconds until the process ends.
        end: called with the line that says why; does not return.
    """

    def __init__(self, patience: float = 5.0, end: Callable[[str], object] = end_process) -> None:
        self._thread = BackgroundThread("pipeline collectives")
        self._failure = _Failure(patience, end)
        weakref.finalize(self, self._failure.timer.cancel)

    def post(self, chain: Chain) -> Pending:
        return _InThread(self._thread.submit(partial(self._failure.run, chain)), self._failure)

    def finish(self) -> None:
        self._thread.close()
        self._failure.report()


class _Failure:
    """The first error of a chain. A timer ends the process unless :meth:`report` raises the error first."""

    def __init__(self, patience: float, end: Callable[[str], object]) -> None:
        self._end = end
        self._error: BaseException | None = None
        self.timer = threading.Timer(patience, self._end_process)
        self.timer.daemon = True

    def run(self, chain: Chain) -> Tensor | None:
        """Runs ``chain``, unless one before it has failed."""
        if self._error is None:
            try:
                with torch.no_grad():
                    return chain()
            except BaseException as error:
                self._error = error
                self.timer.start()
        raise self._error

    def report(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            self.timer.cancel()
            raise self._error

    def _end_process(self) -> None:
        assert self._error is not None
        traceback.print_exception(self._error)
        line = f"error: a collective of the pipeline failed: {self._error!r}"
        self._end(one_line(f"{Path(sys.argv[0]).name}: {line}"))


class _InThread:
    """A chain that a worker runs or has run."""

    def __init__(self, future: Future[Tensor | None], failure: _Failure) -> None:
        self._future, self._failure = future, failure

    def wait(self) -> Tensor:
        future = self._future
        del self._future  # which keeps the result
        if future.exception() is not None:
            self._failure.report()
        return _checked(future.result())


class SideStream(CollectiveRunner):
    """Runs chains at once on a second stream. Posting does not wait for other ranks.

    A chain starts once the current stream has reached the point of posting; where its result is waited for, the current
    stream waits for its end. The chain's tensors stay alive until then or until a later chain's result is waited for,
    so the current stream may reuse their memory. Tensors that a chain makes need no ``record_stream``: only a later
    chain can get their memory, and before it begins all passes are done that could have used them.

    Its stream has high priority: ranks that wait for a chain wait for its small computations too. ``cuda`` is
    ``torch.cuda``, or what replaces it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._side = _side_stream(device, cuda)
        self._numbers = count()
        self._running: deque[tuple[int, Chain]] = deque()

    def post(self, chain: Chain) -> Pending:
        self._side.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._side), torch.no_grad():
            result = chain()
        number = next(self._numbers)
        self._running.append((number, chain))
        return _OnStream(result, partial(self._wait, number, self._side.record_event()))

    def _wait(self, number: int, event: Any) -> None:
        """Makes the current stream wait for ``event``, the end of that chain, and frees all chains up to it."""
        self._cuda.current_stream(self._device).wait_event(event)
        while self._running and self._running[0][0] <= number:
            self._running.popleft()

    def finish(self) -> None:
        """Makes the current stream wait, not the host."""
        self._cuda.current_stream(self._device).wait_stream(self._side)
        self._running.clear()


@cache
def _side_stream(device: torch.device, cuda: Any) -> Any:
    """Returns one stream for all runs: each stream's memory is a pool of its own."""
    return cuda.Stream(device, priority=-1)


class _OnStream:
    """The result of a chain on a side stream, there once the current stream has passed ``wait``."""

    def __init__(self, result: Tensor | None, wait: Callable[[], None]) -> None:
        self._result, self._wait = result, wait

    def wait(self) -> Tensor:
        result, self._result = _checked(self._result), None
        self._wait()
        return result


def _checked(result: Tensor | None) -> Tensor:
    if result is None:
        raise RuntimeError("a collective returned nothing on a rank where a pass takes its result")
    return result.detach()
