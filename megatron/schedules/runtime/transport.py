"""Transport: messages between pipeline ranks over torch.distributed, one process group for each direction of a pair."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.runtime.program import Channel


class Pending(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tensor:
        """The tensor, once it is there (for a CUDA device: ordered before whatever the current stream does next). Called once."""
        ...


class Transport(Protocol):
    """Messages of one run of one rank. Each directed pair of ranks is a channel that keeps its order."""

    def send(self, peer: int, tensor: Tensor) -> None:
        """Start sending ``tensor`` to pipeline rank ``peer``; returns at once. Its storage must not be written to any more."""
        ...

    def receive(self, peer: int) -> Pending:
        """Post the receive of the next message from pipeline rank ``peer``; returns at once."""
        ...

    def finish(self) -> None:
        """Wait until every send has completed."""
        ...


class MessageSpec(NamedTuple):
    """What every message of a run looks like: both ends must agree on it beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Channels:
    """The process groups of one process, made once by :func:`make_channels` and used by every run.

    Args:
        global_ranks: the global rank of each pipeline rank of this process's pipeline.
        outgoing, incoming: by pipeline rank of the peer, the group of the channel to it and from it.
        device: where the backend takes its tensors from: the CPU for gloo, this process's GPU for NCCL.
        reports_completion: whether the backend tells, without waiting, that a send has completed.
    """

    global_ranks: tuple[int, ...]
    outgoing: Mapping[int, dist.ProcessGroup]
    incoming: Mapping[int, dist.ProcessGroup]
    device: torch.device
    reports_completion: bool


def make_channels(
    pipelines: Sequence[Sequence[int]],
    channels: Iterable[Channel],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Channels:
    """Make one two-rank process group for each of ``channels`` in each pipeline. Collective over the whole world.

    Why one for each direction: NCCL runs the messages between two ranks of one group one after another in the order
    issued, both directions together, each waiting for its partner; a rank that sends and then receives would hang
    against one that does the same. With its own group each direction has its own communicator and stream.

    One number goes over every channel before it is used. NCCL makes a communicator at the first message and blocks the
    host until both ends are there; in a run the first receive is posted ahead of passes that its sender waits for.

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order; the same on every process.
        channels: as :func:`.program.channels_of` gives them; the same on every process.
        backend: ``gloo`` or ``nccl``; the default group's where None.
        timeout: how long a receive or a send may take before it raises; torch's default where None.

    Raises:
        ValueError: where this process is not in exactly one pipeline.
        RuntimeError: where a channel does not carry what was sent.
    """
    me = dist.get_rank()
    mine = [tuple(pipeline) for pipeline in pipelines if me in pipeline]
    if len(mine) != 1:
        raise ValueError(f"global rank {me} is in {len(mine)} of the pipelines {list(map(list, pipelines))}; it must be in one")
    backend = backend or dist.get_backend()
    order = sorted(set(channels))
    outgoing: dict[int, dist.ProcessGroup] = {}
    incoming: dict[int, dist.ProcessGroup] = {}
    for pipeline in pipelines:
        for channel in order:
            ends = pipeline[channel.source], pipeline[channel.destination]
            group = dist.new_group(list(ends), timeout=timeout, backend=backend, group_desc=f"pipeline {channel}")
            if me == ends[0]:
                outgoing[channel.destination] = group
            elif me == ends[1]:
                incoming[channel.source] = group
    on_gpu = "nccl" in backend
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    made = Channels(mine[0], outgoing, incoming, device, reports_completion=on_gpu)
    _greet(made, mine[0].index(me), order)
    return made


def _greet(made: Channels, rank: int, order: Sequence[Channel]) -> None:
    for number, channel in enumerate(order):  # the same order everywhere, so nobody waits in a circle
        if rank == channel.source:
            word = torch.tensor([number], device=made.device)
            _isend(word, made.global_ranks[channel.destination], made.outgoing[channel.destination]).wait()
        elif rank == channel.destination:
            word = torch.tensor([-1], device=made.device)
            _irecv(word, made.global_ranks[channel.source], made.incoming[channel.source]).wait()
            if word.item() != number:
                raise RuntimeError(f"channel {channel} brought {word.item()} instead of {number}: groups were made in another order")


class GroupTransport:
    """The messages of one run over :class:`Channels`; make a new one for each run, it costs next to nothing.

    A send is posted and not waited for. A tensor stays alive until its send has completed and is let go of while the
    run goes on. Over gloo, which cannot be asked and takes tensors in host memory only, a thread waits for the sends
    and tensors of another device are staged through the host.

    On NCCL no stream bookkeeping is needed beyond this: a send waits for what the current stream has queued so far, a
    receive's ``wait`` makes the current stream wait, and storage goes back to the current stream's pool only once the
    message has completed. A posted receive occupies a few multiprocessors until its message comes.

    Args:
        channels: this process's groups.
        spec: what every message of this run looks like.
    """

    def __init__(self, channels: Channels, spec: MessageSpec) -> None:
        self._channels = channels
        self._spec = spec
        self._sends: _Sends = _PolledSends() if channels.reports_completion else _WaitedSends()

    @property
    def unfinished(self) -> int:
        """How many sends still keep their tensor alive."""
        return self._sends.count

    def send(self, peer: int, tensor: Tensor) -> None:
        """See :meth:`Transport.send`.

        Raises:
            ValueError: where ``tensor`` is not as the spec says; the other end would read it wrongly.
        """
        shape, dtype, _ = self._spec
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"a message of {dtype} {tuple(shape)} was agreed, not {tensor.dtype} {tuple(tensor.shape)}")
        self._sends.reclaim()
        payload = tensor.detach().to(self._channels.device).contiguous()
        work = _isend(payload, self._channels.global_ranks[peer], self._channels.outgoing[peer])
        self._sends.add(work, payload)

    def receive(self, peer: int) -> Pending:
        """See :meth:`Transport.receive`."""
        buffer = torch.empty(self._spec.shape, dtype=self._spec.dtype, device=self._channels.device)
        work = _irecv(buffer, self._channels.global_ranks[peer], self._channels.incoming[peer])
        return _Arriving(work, buffer, self._spec.device)

    def finish(self) -> None:
        """See :meth:`Transport.finish`. Raises what a send raised."""
        self._sends.drain()


class _Arriving:
    """A posted receive and its buffer."""

    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer.to(self._device)


class _Sends(Protocol):
    """Sends under way, each with the tensor it reads from."""

    @property
    def count(self) -> int: ...

    def add(self, work: dist.Work, tensor: Tensor) -> None: ...

    def reclaim(self) -> None:
        """Let go of what has completed, without waiting."""

    def drain(self) -> None:
        """Wait for all of them."""


class _PolledSends:
    """For a backend that can be asked whether a send has completed."""

    def __init__(self) -> None:
        self._queue: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def count(self) -> int:
        return len(self._queue)

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        self._queue.append((work, tensor))

    def reclaim(self) -> None:
        while self._queue and self._queue[0][0].is_completed():
            self._queue.popleft()[0].wait()  # does not block any more; raises if the send failed

    def drain(self) -> None:
        while self._queue:
            self._queue[0][0].wait()
            self._queue.popleft()


class _WaitedSends:
    """For gloo, whose ``is_completed`` stays false until somebody waits: a thread does, for the length of one run."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[dist.Work, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._added = 0
        self._done = 0

    @property
    def count(self) -> int:
        return self._added - self._done

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        if self._thread is None:
            # A daemon: a run that ends with an error leaves it behind, and it must not keep the process from ending.
            self._thread = threading.Thread(target=self._wait_in_order, name="pipeline-sends", daemon=True)
            self._thread.start()
        self._added += 1
        self._queue.put((work, tensor))

    def reclaim(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self.reclaim()
        if self.count:
            raise RuntimeError(f"the thread that waits for sends ended with {self.count} not completed")

    def _wait_in_order(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                entry[0].wait()
            except RuntimeError as error:
                self._error = error
                return
            del entry  # not to hold the tensor while waiting for the next
            self._done += 1


def _isend(tensor: Tensor, destination: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.isend(tensor, dst=destination, group=group)
    assert work is not None, "this process is not in the channel's group"
    return work


def _irecv(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.irecv(tensor, src=source, group=group)
    assert work is not None, "this process is not in the channel's group"
    return work
