"""Meetings: chains of collective calls, carried out while the rank goes on computing, one after another.

A chain is a function without arguments that makes calls which wait for other ranks (``torch.distributed``'s own, in a
group of the whole pipeline) and computes a little between them. All ranks post theirs in one order. What a chain gives
is there for whoever waits for it. Nothing in a chain is recorded by autograd.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.schedules.runtime.stall_watch import end_process
from megatron.schedules.utils.errors import one_line

Chain = Callable[[], Tensor | None]


class Coming(Protocol):
    """What a chain will give."""

    def wait(self) -> Tensor:
        """It, once it is there; on a GPU for what the current stream does next. Called once.

        Raises:
            RuntimeError: where the chain gave nothing.
            Exception: what the chain raised, or one before it.
        """
        ...


class Meetings(Protocol):
    """Where chains are carried out, first in first out."""

    def meet(self, chain: Chain) -> Coming:
        """Have ``chain`` carried out after all before it; returns without waiting for other ranks."""
        ...

    def finish(self) -> None:
        """Wait until all chains have been carried out; raises what one raised."""
        ...


def collectives_on(device: torch.device) -> Meetings:
    """What carries out chains that compute on ``device``."""
    return SideStream(device) if device.type == "cuda" else Worker()


class Worker:
    """Carries chains out in a thread of its own, which is there from the first one until :meth:`finish`.

    After a chain that raised no other is carried out: its ranks would meet in different ones. Who waits for any of them
    is told. Where nobody is soon, since the program waits in a call that nothing wakes for what other ranks cannot send
    without this one, the process ends.

    What is set for a thread, such as torch's modes, is set for whoever posts a chain, not for the chain.

    Args:
        patience: seconds until the process ends.
        end: what is done with the line that says why; it does not come back.
    """

    def __init__(self, patience: float = 5.0, end: Callable[[str], object] = end_process) -> None:
        self._chains: SimpleQueue[_Posted | None] | None = None
        self._thread: threading.Thread | None = None
        self._failure = _Failure()
        self._patience, self._end = patience, end

    def meet(self, chain: Chain) -> Coming:
        """See :meth:`Meetings.meet`."""
        posted = _Posted(chain, self._failure)
        if self._chains is None:
            self._chains = SimpleQueue()
            # It holds no reference to this object: where a run is given up, its thread ends with it, if it can.
            args = self._chains, self._failure, self._patience, self._end
            self._thread = threading.Thread(target=_carry_out, args=args, name="pipeline meetings", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._chains.put, None)
        self._chains.put(posted)
        return posted

    def finish(self) -> None:
        """See :meth:`Meetings.finish`."""
        if self._chains is not None and self._thread is not None:
            self._chains.put(None)
            self._thread.join()
            self._chains = self._thread = None
        self._failure.tell()


class _Failure:
    """What a chain raised, if any did, and whether anyone has been told."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._told = False

    @property
    def untold(self) -> bool:
        """Whether there is something to tell that nobody knows."""
        return self.error is not None and not self._told

    def tell(self) -> None:
        """Raise it."""
        if self.error is not None:
            self._told = True
            raise self.error


class _Posted:
    """A chain that a worker has, or has had."""

    def __init__(self, chain: Chain, failure: _Failure) -> None:
        self._chain: Chain | None = chain
        self._failure = failure
        self._given: Tensor | None = None
        self._failed = False
        self._over = threading.Event()

    def carry_out(self) -> None:
        """Unless one before it has failed."""
        chain, self._chain = self._chain, None
        try:
            if self._failure.error is None and chain is not None:
                with torch.no_grad():
                    self._given = chain()
        except BaseException as error:
            self._failure.error = error
        self._failed = self._failure.error is not None
        self._over.set()

    def wait(self) -> Tensor:
        """See :meth:`Coming.wait`."""
        self._over.wait()
        if self._failed:
            self._failure.tell()
        given, self._given = self._given, None
        return _something(given)


def _carry_out(
    chains: SimpleQueue[_Posted | None], failure: _Failure, patience: float, end: Callable[[str], object]
) -> None:
    while True:
        try:
            posted = chains.get(timeout=patience if failure.untold else None)
        except Empty:
            if failure.untold and failure.error is not None:
                traceback.print_exception(failure.error)
                line = f"error: a collective of the pipeline failed: {failure.error!r}"
                end(one_line(f"{Path(sys.argv[0]).name}: {line}"))
                return
            continue
        if posted is None:
            return
        posted.carry_out()
        del posted  # what it gave is not kept while there is nothing to do


class SideStream:
    """Carries chains out on a stream beside the one that computes, at once: posting does not wait for other ranks.

    A chain starts once the current stream has come to where it was posted, and the current stream waits for its end
    where what it gives is waited for. What a chain holds stays alive until then, or until the device is seen to have
    done it; what it gives belongs to the side stream's pool, and goes back there once the current stream has used it.
    Whatever else a chain leaves may be used by a pass that takes what this or a later one gives, and let go of after:
    no chain that could get its memory begins before that pass is done.

    Args:
        device: a GPU.
        cuda: ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._side = _side_stream(device, cuda)
        self._under_way: deque[tuple[Any, Chain]] = deque()

    def meet(self, chain: Chain) -> Coming:
        """See :meth:`Meetings.meet`."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        self._side.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._side), torch.no_grad():
            given = chain()
        event = self._side.record_event()
        self._under_way.append((event, chain))
        return _OnStream(given, event, lambda: self._cuda.current_stream(self._device))

    def finish(self) -> None:
        """See :meth:`Meetings.finish`; the current stream waits, the host does not."""
        self._cuda.current_stream(self._device).wait_stream(self._side)
        self._under_way.clear()


@cache
def _side_stream(device: torch.device, cuda: Any) -> Any:
    """One for all runs: each stream's memory is a pool of its own."""
    return cuda.Stream(device)


class _OnStream:
    """What a chain gives on a side stream, once ``event`` has come."""

    def __init__(self, given: Tensor | None, event: Any, current_stream: Callable[[], Any]) -> None:
        self._given, self._event, self._current_stream = given, event, current_stream

    def wait(self) -> Tensor:
        given, self._given = _something(self._given), None
        stream = self._current_stream()
        stream.wait_event(self._event)
        given.record_stream(stream)
        return given


def _something(given: Tensor | None) -> Tensor:
    if given is None:
        raise RuntimeError("a collective brought nothing to a rank where a pass takes what it brings")
    return given.detach()
