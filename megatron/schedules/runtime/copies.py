"""Copies between a device and its host, beside what the device computes: on streams, or in threads where it is a CPU.

Both directions may be under way at once. Those of one direction are carried out one after another, in the order in
which they were begun.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""From, to: one-dimensional ``uint8`` tensors of one size."""


class Copying(Protocol):
    """Copies that were begun together."""

    def wait(self) -> None:
        """Whatever the device is given to do from now on comes after their end; on a GPU the host does not wait.

        Raises:
            Exception: what went wrong with them, where that is known.
        """
        ...


class CopyWatch(Protocol):
    """Told of copies, and waits for nothing."""

    def copying(self) -> Callable[[], None]:
        """Some begin together; what this gives is called in their stream or thread, as they begin and as they end."""
        ...

    def arrived(self) -> None:
        """What the pass under way needs has come back: from now on it computes."""
        ...


class Copies(Protocol):
    """Carries copies out.

    Attributes:
        device: whose memory they go from and to.
        smallest: bytes; of less it is not worth while.
        watch: told of each that is begun; None (usual) of none.
    """

    device: torch.device
    smallest: int
    watch: CopyWatch | None

    def allocate(self, size: int) -> Tensor:
        """So many bytes of host memory for copies to use: one-dimensional, ``uint8``.

        Raises:
            Exception: there is not so much.
        """
        ...

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        """Begin to copy as soon as the device has done what it has been given so far, and ``after`` has ended.

        Both ends of each pair must stay as they are until the device has come to where that is waited for.
        """
        ...

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        """Begin to copy as soon as the device has done what it has been given so far."""
        ...


def copies_on(device: torch.device, *, gbps: float = math.inf, both_ways: bool = True) -> Copies:
    """What carries out copies between ``device`` and the host.

    Args:
        device: a GPU, or a CPU that stands for one.
        gbps: 10**9 bytes a second that each direction of a CPU's copies may take; a GPU's take what they get.
        both_ways: whether there may be copies in both directions at once.
    """
    return StreamCopies(device, both_ways=both_ways) if device.type == "cuda" else ThreadCopies(gbps, both_ways)


class StreamCopies:
    """Copies of a GPU, on a stream for each direction.

    Its memory needs no mark of who uses it (``record_stream``): what is copied from was made for the stream that
    computes, which waits for the copy's end before it is let go of, and so is what is copied to.

    Args:
        device: the GPU.
        both_ways: whether each direction has a stream.
        cuda: ``torch.cuda``, or what stands in for it.
    """

    # A copy takes some microseconds to be begun, in which a link of 50 GB/s carries so much.
    smallest = 2**18

    def __init__(self, device: torch.device, *, both_ways: bool = True, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.watch: CopyWatch | None = None
        self._cuda = cuda
        self._out, self._back = _streams(device, both_ways, cuda)

    def allocate(self, size: int) -> Tensor:
        """See :meth:`Copies.allocate`.

        Torch's own pinned memory comes in powers of two, up to twice what was asked for.
        """
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        runtime, start = self._cuda.cudart(), memory.data_ptr()
        if status := int(runtime.cudaHostRegister(start, size, 0)):
            raise MemoryError(f"pinning it ended with CUDA's error {status}")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
        return memory

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        """See :meth:`Copies.to_host`."""
        return self._begin(self._out, pairs, after)

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        """See :meth:`Copies.from_host`."""
        return self._begin(self._back, pairs, None)

    def _begin(self, stream: Any, pairs: Sequence[Pair], after: Copying | None) -> Copying:
        stream.wait_stream(self._cuda.current_stream(self.device))
        if isinstance(after, _OnStream):
            stream.wait_event(after.event)
        mark = _unwatched if self.watch is None else self.watch.copying()
        with self._cuda.stream(stream):
            mark()
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            mark()
        return _OnStream(stream.record_event(), self._cuda, self.device)


@cache
def _streams(device: torch.device, both_ways: bool, cuda: Any) -> tuple[Any, Any]:
    """To the host and from it; the same for whoever asks, for a process should have few."""
    out = cuda.Stream(device)
    return out, cuda.Stream(device) if both_ways else out


class _OnStream:
    """Copies that end with ``event``."""

    def __init__(self, event: Any, cuda: Any, device: torch.device) -> None:
        self.event = event
        self._cuda, self._device = cuda, device

    def wait(self) -> None:
        self._cuda.current_stream(self._device).wait_event(self.event)


class Pace(NamedTuple):
    """What copies are slowed down by.

    Args:
        now: seconds of a clock that only goes forward.
        sleep: returns when so many seconds have passed on that clock.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


_REAL = Pace()


class ThreadCopies:
    """Copies of a CPU that stands for a device, in a thread for each direction, no faster than is given.

    Args:
        gbps: 10**9 bytes a second of each direction.
        both_ways: whether each direction has a thread.
        pace: the clock that tells how long copies take.
    """

    smallest = 1

    def __init__(self, gbps: float = math.inf, both_ways: bool = True, pace: Pace = _REAL) -> None:
        self.device = torch.device("cpu")
        self.watch: CopyWatch | None = None
        self._pace = pace
        self._out = _Lane(gbps, pace)
        self._back = _Lane(gbps, pace) if both_ways else self._out

    def allocate(self, size: int) -> Tensor:
        """See :meth:`Copies.allocate`."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        """See :meth:`Copies.to_host`."""
        return self._out.post(_InThread(pairs, after, self.watch, self._pace.now()))

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        """See :meth:`Copies.from_host`."""
        return self._back.post(_InThread(pairs, None, self.watch, self._pace.now()))


class _Lane:
    """A thread that copies, which is there from the first copy on for as long as this object is."""

    def __init__(self, gbps: float, pace: Pace) -> None:
        self._bytes_a_second, self._pace = 1e9 * gbps, pace
        self._posted: SimpleQueue[_InThread | None] | None = None

    def post(self, copying: _InThread) -> _InThread:
        if self._posted is None:
            self._posted = SimpleQueue()
            args = self._posted, self._bytes_a_second, self._pace
            threading.Thread(target=_carry_out, args=args, name="pipeline copies", daemon=True).start()
            weakref.finalize(self, self._posted.put, None)
        self._posted.put(copying)
        return copying


class _InThread:
    """Copies that a lane has, or has had."""

    def __init__(self, pairs: Sequence[Pair], after: Copying | None, watch: CopyWatch | None, begun: float) -> None:
        self._pairs, self._after = pairs, after
        self._mark = _unwatched if watch is None else watch.copying()
        self._begun = begun
        self._over = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def carry_out(self, free_at: float, bytes_a_second: float, pace: Pace) -> float:
        """Copy, and take as long as that takes at such a rate from when the lane was free; returns when it ended."""
        pairs, after, self._pairs, self._after = self._pairs, self._after, (), None
        end = max(free_at, self._begun)
        try:
            if after is not None:
                after.wait()
            self._mark()
            for source, target in pairs:
                target.copy_(source)
            end += sum(source.nbytes for source, _ in pairs) / bytes_a_second
            pace.sleep(max(0.0, end - pace.now()))
            self._mark()
        except Exception as error:
            self._error = error
        self._over.set()
        return end


def _carry_out(posted: SimpleQueue[_InThread | None], bytes_a_second: float, pace: Pace) -> None:
    free_at = 0.0
    while (copying := posted.get()) is not None:
        free_at = copying.carry_out(free_at, bytes_a_second, pace)
        del copying  # which is not kept while there is nothing to do


def _unwatched() -> None:
    """What is done about a copy's begin and end where nobody watches."""
