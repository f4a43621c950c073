"""Transport: messages between pipeline ranks over torch.distributed, a process group for each direction.

Collectives of all ranks of a pipeline go over a group of their own (:mod:`.collectives`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, product
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.runtime.collectives import Chain, Meetings, collectives_on
from megatron.schedules.runtime.program import Channel


class Pending(Protocol):
    """A receive or a collective that was posted."""

    def wait(self) -> Tensor:
        """The tensor that it brings, once it is there. Called once.

        On a GPU it may still be coming: it is there for whatever the current stream does next.
        """
        ...


class Transport(Protocol):
    """Messages of one run of one rank. Each directed pair of ranks is a channel that keeps its order."""

    def send(self, peer: int, tensor: Tensor) -> None:
        """Start sending ``tensor`` to pipeline rank ``peer``; returns at once.

        The tensor has no graph behind it. Its storage must not be written to any more; it is kept alive as long as
        needed.
        """
        ...

    def receive(self, peer: int) -> Pending:
        """Post the receive of the next message from pipeline rank ``peer``; returns at once."""
        ...

    def meet(self, chain: Chain) -> Pending:
        """Post a collective of all ranks of the pipeline, which each post all of theirs in one order.

        Args:
            chain: what this rank does in it; carried out once, after those posted before it.
        """
        ...

    def finish(self) -> None:
        """Wait until every send and every collective has completed; raises what one of them raised."""
        ...


class MessageSpec(NamedTuple):
    """What every message of a run looks like: both ends must agree on it beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class End:
    """This process's end of a channel.

    It posts on the group itself: ``torch.distributed.isend`` and ``irecv`` do the same after finding out anew, for each
    message, what never changes, and take a fifth longer for it.

    Args:
        group: the channel's two processes.
        other: the rank in ``group`` of the other one.
    """

    group: dist.ProcessGroup
    other: int

    def send(self, tensor: Tensor) -> dist.Work:
        """Post the send of ``tensor``, a contiguous one."""
        return self.group.send([tensor], self.other, 0)

    def receive(self, tensor: Tensor) -> dist.Work:
        """Post a receive into ``tensor``, a contiguous one."""
        return self.group.recv([tensor], self.other, 0)


@dataclass(frozen=True)
class Channels:
    """One process's ends of its channels, made once by :func:`make_channels` and used by every run.

    Args:
        outgoing, incoming: by pipeline rank of the peer, the end of the channel to it and from it.
        device: where the backend takes its tensors from: the CPU for gloo, this process's GPU for NCCL.
    """

    outgoing: dict[int, End]
    incoming: dict[int, End]
    device: torch.device


def make_channels(
    pipelines: Sequence[Sequence[int]],
    channels: Iterable[Channel],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Callable[[], Any] = lambda: None,
    new_group: Callable[..., dist.ProcessGroup] = dist.new_group,
) -> Channels:
    """Make a two-rank process group for each of ``channels`` in each pipeline; every process must call it.

    Why one for each direction: NCCL runs the messages between two ranks of one group one after another in the
    order issued, both directions together, each waiting for its partner; a rank that sends and then receives
    would hang against one that does the same. With its own group each direction has its own communicator and
    stream.

    One number goes over every channel before it is used. NCCL makes a communicator at the first message and
    blocks the host until both ends are there; in a run the first receive is posted ahead of passes that its
    sender waits for. Pairs that share no rank are greeted at once, so this takes no longer in a long pipeline.

    Every process is told of every group, though it is in a few: torch counts them to name them, unless told to ask
    only the members (``use_local_synchronization``), and then it counts those of the process, of which stock has made
    more on some ranks than on others.

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order; the same on every
            process.
        channels: as :func:`.program.channels_of` gives them; the same on every process.
        backend: ``gloo`` or ``nccl``; the default group's where None.
        timeout: how long a receive or a send may take before it raises; torch's default where None.
        options: makes what a group is told of its backend (``pg_options``), anew for each.
        new_group: as ``torch.distributed.new_group``.

    Raises:
        ValueError: where this process is not in exactly one pipeline.
        RuntimeError: where a channel does not carry what was sent.
    """
    me, mine = dist.get_rank(), _own_pipeline(pipelines)
    backend = backend or dist.get_backend()
    device = _device_of(backend)
    made, numbers = Channels({}, {}, device), count()
    for collective in rounds(channels):
        for pipeline, channel in product(pipelines, collective):
            ends = pipeline[channel.source], pipeline[channel.destination]
            group = new_group(
                list(ends), timeout=timeout, backend=backend, pg_options=options(), group_desc=f"pipeline {channel}"
            )
            if me == ends[0]:
                made.outgoing[channel.destination] = End(group, dist.get_group_rank(group, ends[1]))
            elif me == ends[1]:
                made.incoming[channel.source] = End(group, dist.get_group_rank(group, ends[0]))
        for channel in collective:
            _greet(made, mine.index(me), channel, next(numbers))
    return made


def make_collective_group(
    pipelines: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Callable[[], Any] = lambda: None,
    new_group: Callable[..., dist.ProcessGroup] = dist.new_group,
) -> dist.ProcessGroup:
    """Make a process group of each whole pipeline, for its collectives; every process must call it.

    Torch puts its ranks into the order of their global numbers, whatever the pipeline's. They add up a number before it
    is used, which makes NCCL's communicator.

    Args:
        pipelines, backend, timeout, options, new_group: as :func:`make_channels` has them.

    Returns:
        the group of this process's pipeline.

    Raises:
        ValueError: where this process is not in exactly one pipeline.
        RuntimeError: where the group does not add up.
    """
    mine = _own_pipeline(pipelines)
    backend = backend or dist.get_backend()
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for pipeline in map(tuple, pipelines):
        found[pipeline] = new_group(
            list(pipeline), timeout=timeout, backend=backend, pg_options=options(), group_desc="pipeline meetings"
        )
    word = torch.tensor([1 + mine.index(dist.get_rank())], device=_device_of(backend))
    dist.all_reduce(word, group=found[mine])
    if word.item() != sum(range(1, 1 + len(mine))):
        raise RuntimeError(f"the group of pipeline {list(mine)} adds 1 to {len(mine)} up to {word.item()}")
    return found[mine]


def _own_pipeline(pipelines: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The one of ``pipelines`` that this process is in."""
    me = dist.get_rank()
    mine = [tuple(pipeline) for pipeline in pipelines if me in pipeline]
    if len(mine) != 1:
        raise ValueError(
            f"global rank {me} is in {len(mine)} of the pipelines {list(map(list, pipelines))}; it must be in one"
        )
    return mine[0]


def _device_of(backend: str) -> torch.device:
    """Where ``backend`` takes its tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def rounds(channels: Iterable[Channel]) -> list[list[Channel]]:
    """``channels`` in rounds in which no rank meets two others: four for neighbours in a line, however long."""
    found: list[list[Channel]] = []
    busy: list[set[int]] = []
    for channel in sorted(set(channels)):
        ends = {channel.source, channel.destination}
        at = next((at for at, ranks in enumerate(busy) if not ranks & ends), len(busy))
        if at == len(busy):
            busy.append(set())
            found.append([])
        busy[at] |= ends
        found[at].append(channel)
    return found


def _greet(made: Channels, rank: int, channel: Channel, number: int) -> None:
    if rank == channel.source:
        word = torch.tensor([number], device=made.device)
        made.outgoing[channel.destination].send(word).wait()
    elif rank == channel.destination:
        word = torch.tensor([-1], device=made.device)
        made.incoming[channel.source].receive(word).wait()
        if word.item() != number:
            raise RuntimeError(
                f"channel {channel} brought {word.item()} instead of {number}: "
                "its two ends made their groups in different orders"
            )


class GroupTransport:
    """The messages of one run over :class:`Channels`; make a new one for each run, it costs next to nothing.

    A send is posted and not waited for. Its tensor stays alive until the send has completed; completed ones
    are let go of while the run goes on. gloo says nothing about a send before it is waited for, so there all
    are held until :meth:`finish`. gloo takes tensors in host memory only: those of another device are staged
    through it.

    On NCCL no stream bookkeeping is needed beyond this: a send waits for what the current stream has queued so
    far, a receive's ``wait`` makes the current stream wait, and storage goes back to the current stream's pool
    only once its message has completed. A posted receive occupies a few multiprocessors until its message comes.

    Args:
        channels: this process's groups.
        spec: what every message of this run looks like.
        meetings: carries out collectives; what suits the spec's device where None.
    """

    def __init__(self, channels: Channels, spec: MessageSpec, meetings: Meetings | None = None) -> None:
        self._channels = channels
        self._spec = spec
        self._collectives = meetings
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def unfinished(self) -> int:
        """How many sends still keep their tensor alive."""
        return len(self._sends)

    def send(self, peer: int, tensor: Tensor) -> None:
        """See :meth:`Transport.send`.

        Raises:
            ValueError: where ``tensor`` is not as the spec says; the other end would read it wrongly.
        """
        shape, dtype, _ = self._spec
        if tensor.shape != shape or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"a message of {dtype} {tuple(shape)} was agreed, not {found}")
        self.post_send(peer, tensor)

    def receive(self, peer: int) -> Pending:
        """See :meth:`Transport.receive`."""
        return self.post_receive(peer, self._spec.shape)

    def meet(self, chain: Chain) -> Pending:
        """See :meth:`Transport.meet`."""
        if self._collectives is None:
            self._collectives = collectives_on(self._spec.device)
        return self._collectives.meet(chain)

    def post_send(self, peer: int, tensor: Tensor) -> None:
        """Send ``tensor`` as it is; the other end must post a receive of its shape."""
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()[0].wait()  # no longer blocks; raises where the send failed
        payload = tensor.to(self._channels.device).contiguous()
        self._sends.append((self._channels.outgoing[peer].send(payload), payload))

    def post_receive(self, peer: int, shape: Sequence[int]) -> Pending:
        """Post the receive of a tensor of ``shape``."""
        buffer = torch.empty(shape, dtype=self._spec.dtype, device=self._channels.device)
        return _Arriving(self._channels.incoming[peer].receive(buffer), buffer, self._spec.device)

    def finish(self) -> None:
        """See :meth:`Transport.finish`."""
        if self._collectives is not None:
            self._collectives.finish()
        while self._sends:
            self._sends[0][0].wait()
            self._sends.popleft()


class _Arriving:
    """A posted receive and its buffer."""

    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer.to(self._device)
