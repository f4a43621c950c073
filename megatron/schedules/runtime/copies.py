"""Copies between a device and its host, in the background: on streams, or in threads where the device is a CPU.

Both directions may run at once. Those of one direction run one after another, in the order in which they began.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.schedules.runtime.background_thread import BackgroundThread

Pair = tuple[Tensor, Tensor]
"""Source and target of a copy: one-dimensional ``uint8`` tensors of one size."""


class Copying(Protocol):
    """Copies that were begun together."""

    def wait(self) -> None:
        """Makes later work on the device wait for these copies. On a GPU the host does not wait.

        Raises:
            Exception: the error of a copy, if it is known.
        """
        ...


class CopyWatch(Protocol):
    """Notified of copies; waits for nothing."""

    def copying(self) -> Callable[[], None]:
        """Copies begin; the returned function is called in their stream or thread as they begin and as they end."""
        ...

    def arrived(self) -> None:
        """The data that the current pass needs is back on the device: from now on the pass computes."""
        ...


class Copies(Protocol):
    """Carries out copies.

    Attributes:
        device: the device whose memory is copied.
        smallest: the fewest bytes that are worth a copy.
        watch: notified of each copy; None (usual) for nobody.
    """

    device: torch.device
    smallest: int
    watch: CopyWatch | None

    def allocate(self, size: int) -> Tensor:
        """Allocates so many bytes of host memory for copies to use: one-dimensional, ``uint8``.

        Raises:
            Exception: there is not so much.
        """
        ...

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        """Begins to copy once the device has finished its queued work and ``after`` has ended.

        Both ends of each pair must not change until the device has passed the wait for the copy.
        """
        ...

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        """Begins to copy once the device has finished its queued work."""
        ...


def copies_on(device: torch.device) -> Copies:
    """Returns the copies between the host and ``device``, a GPU or a CPU that stands for one."""
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()


class StreamCopies(Copies):
    """Copies of a GPU, on a stream for each direction.

    Memory needs no ``record_stream``: the source of a copy was made for the stream that computes, which waits for the
    copy's end before the source is freed; the same holds for the target.

    Args:
        device: the GPU.
        both_ways: whether each direction has a stream.
        cuda: ``torch.cuda``, or what replaces it.
    """

    # Starting a copy takes some microseconds, in which a link of 50 GB/s carries so much.
    smallest = 2**18

    def __init__(self, device: torch.device, *, both_ways: bool = True, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.watch: CopyWatch | None = None
        self._cuda = cuda
        self._out, self._back = _streams(device, both_ways, cuda)

    def allocate(self, size: int) -> Tensor:
        """Pins memory itself: torch's own pinned memory comes in powers of two, up to twice as much.

        Whole pages, since two registrations may not share one. Children, such as a data loader's workers, do not get
        them: pinned pages would be copied for each child.
        """
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        runtime, start = self._cuda.cudart(), memory.data_ptr()
        if status := int(runtime.cudaHostRegister(start, size, 0)):
            raise MemoryError(f"pinning it ended with CUDA's error {status}")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
        return memory

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        return self._begin(self._out, pairs, after)

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        return self._begin(self._back, pairs, None)

    def _begin(self, stream: Any, pairs: Sequence[Pair], after: Copying | None) -> Copying:
        stream.wait_stream(self._cuda.current_stream(self.device))
        if isinstance(after, _CopiesOnStream):
            stream.wait_event(after.event)
        mark = _unwatched if self.watch is None else self.watch.copying()
        with self._cuda.stream(stream):
            mark()
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            mark()
        return _CopiesOnStream(stream.record_event(), self._cuda, self.device)


@cache
def _streams(device: torch.device, both_ways: bool, cuda: Any) -> tuple[Any, Any]:
    """Returns the streams to the host and from it, the same for every caller: a process should have few streams."""
    out = cuda.Stream(device)
    return out, cuda.Stream(device) if both_ways else out


class _CopiesOnStream:
    """Copies that end with ``event``."""

    def __init__(self, event: Any, cuda: Any, device: torch.device) -> None:
        self.event = event
        self._cuda, self._device = cuda, device

    def wait(self) -> None:
        self._cuda.current_stream(self._device).wait_event(self.event)


class Pace(NamedTuple):
    """The clock by which copies are slowed down.

    Args:
        now: seconds of a clock that only goes forward.
        sleep: returns when so many seconds have passed on that clock.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


_REAL = Pace()


class ThreadCopies(Copies):
    """Copies of a CPU that stands for a device, in a thread for each direction, at a limited rate.

    Args:
        gbps: 10**9 bytes a second of each direction.
        both_ways: whether each direction has a thread.
        pace: the clock.
    """

    smallest = 1

    def __init__(self, gbps: float = math.inf, both_ways: bool = True, pace: Pace = _REAL) -> None:
        self.device = torch.device("cpu")
        self.watch: CopyWatch | None = None
        self._out = _Lane(gbps, pace)
        self._back = _Lane(gbps, pace) if both_ways else self._out

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        return self._out.begin(pairs, after, self.watch)

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        return self._back.begin(pairs, None, self.watch)


class _Lane:
    """Copies of one direction, one after another."""

    def __init__(self, gbps: float, pace: Pace) -> None:
        self._bytes_per_second, self._pace = 1e9 * gbps, pace
        self._thread = BackgroundThread("pipeline copies")
        self._free_at = 0.0

    def begin(self, pairs: Sequence[Pair], after: Copying | None, watch: CopyWatch | None) -> Copying:
        mark = _unwatched if watch is None else watch.copying()
        return _CopiesInThread(self._thread.submit(partial(self._copy, pairs, after, mark, self._pace.now())))

    def _copy(self, pairs: Sequence[Pair], after: Copying | None, mark: Callable[[], None], begun: float) -> None:
        """Copies, then sleeps until a copy at the lane's rate would have ended."""
        self._free_at = max(self._free_at, begun)
        if after is not None:
            after.wait()
        mark()
        for source, target in pairs:
            target.copy_(source)
        self._free_at += sum(source.nbytes for source, _ in pairs) / self._bytes_per_second
        self._pace.sleep(max(0.0, self._free_at - self._pace.now()))
        mark()


class _CopiesInThread(NamedTuple):
    """Copies that a lane runs or has run."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()


def _unwatched() -> None:
    """Does nothing: nobody watches the copy."""
