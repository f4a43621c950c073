"""Messages between pipeline ranks over torch.distributed, with a process group for each direction.

Collectives of all ranks of a pipeline go over a group of their own (:mod:`.collectives`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from megatron.schedules.programs.program import SENDS_IN_FLIGHT, Channel
from megatron.schedules.runtime.collectives import Chain, CollectiveRunner, Pending, collectives_on
from megatron.schedules.runtime.function_modes import without_modes


class MessageSpec(NamedTuple):
    """Shape, dtype and device of every message of a run; both ends must agree on them beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """This process's end of a channel.

    It posts on the group itself: ``torch.distributed.isend`` and ``irecv`` do the same, but look up for each message
    what never changes, and take a fifth longer.

    The group gets the memory without its owner. NCCL's would otherwise record its stream as a user of it, and the
    allocator would reuse the memory only when the *host* has seen the message end: a host that runs ahead would hold
    messages that no plan counts. So who posts keeps the tensor until the stream that frees it has waited.

    Args:
        group: the channel's two processes.
        other: the rank in ``group`` of the other one.
        streams: whether messages go over a stream, as NCCL's.
    """

    group: dist.ProcessGroup
    other: int
    streams: bool

    def send(self, tensor: Tensor) -> dist.Work:
        """Posts the send of a contiguous ``tensor``."""
        return self.group.send([disowned(tensor) if self.streams else tensor], self.other, 0)

    def receive(self, tensor: Tensor) -> dist.Work:
        """Posts a receive into a contiguous ``tensor``."""
        return self.group.recv([disowned(tensor) if self.streams else tensor], self.other, 0)


def disowned(tensor: Tensor) -> Tensor:
    """Returns the same memory in a tensor whose allocator does not know it (``recordStream`` then does nothing)."""
    return torch.from_dlpack(to_dlpack(tensor))


@dataclass(frozen=True)
class Channels:
    """One process's ends of its channels, made once by :func:`make_channels` and used by every run.

    Args:
        outgoing, incoming: by pipeline rank of the peer, the end of the channel to it and from it.
        device: where the backend takes its tensors from: the CPU for gloo, this process's GPU for NCCL.
    """

    outgoing: dict[int, ChannelEnd]
    incoming: dict[int, ChannelEnd]
    device: torch.device


def make_channels(
    pipelines: Sequence[Sequence[int]],
    channels: Iterable[Channel],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Callable[[], Any] = lambda: None,
    new_group: Callable[..., Any] = dist.new_group,
) -> Channels:
    """Makes a two-rank process group for each of ``channels`` in each pipeline; every process must call it.

    Each direction has its own group: NCCL runs the messages between two ranks of one group one after another, both
    directions together, each waiting for its partner, so two ranks that both send and then receive would hang. One
    number goes over every channel, because NCCL makes a communicator at the first message and blocks the host until
    both ends are there. Pairs that share no rank do so at once.

    Every process makes every group, though it is a member of few: torch counts groups to name them.

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order; the same on every process.
        channels: as :func:`.program.channels_of` gives them; the same on every process.
        backend: ``gloo`` or ``nccl``; the default group's where None.
        timeout: of a receive or a send; torch's default where None.
        options: makes a new ``pg_options`` for each group.
        new_group: as ``torch.distributed.new_group``.

    Raises:
        ValueError: this process is not in exactly one pipeline.
        RuntimeError: a channel does not carry what was sent.
    """
    me, mine = dist.get_rank(), _own_pipeline(pipelines)
    backend = backend or dist.get_backend()
    device = _device_of(backend)
    made, numbers, streams = Channels({}, {}, device), count(), device.type == "cuda"
    for disjoint in rounds(channels):
        for pipeline, channel in product(pipelines, disjoint):
            ends = pipeline[channel.source], pipeline[channel.destination]
            group = new_group(
                list(ends), timeout=timeout, backend=backend, pg_options=options(), group_desc=f"pipeline {channel}"
            )
            if me == ends[0]:
                made.outgoing[channel.destination] = ChannelEnd(group, dist.get_group_rank(group, ends[1]), streams)
            elif me == ends[1]:
                made.incoming[channel.source] = ChannelEnd(group, dist.get_group_rank(group, ends[0]), streams)
        for channel in disjoint:
            _exchange(made, mine.index(me), channel, next(numbers))
    return made


def make_collective_group(
    pipelines: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    options: Callable[[], Any] = lambda: None,
    new_group: Callable[..., Any] = dist.new_group,
) -> dist.ProcessGroup:
    """Makes a process group of each whole pipeline, for its collectives; every process must call it.

    Torch orders its ranks by their global numbers. They add up a number, which makes NCCL's communicator. Arguments
    and errors as for :func:`make_channels`. Returns the group of this process's pipeline.
    """
    mine = _own_pipeline(pipelines)
    backend = backend or dist.get_backend()
    groups: dict[tuple[int, ...], Any] = {}
    for pipeline in map(tuple, pipelines):
        groups[pipeline] = new_group(
            list(pipeline), timeout=timeout, backend=backend, pg_options=options(), group_desc="pipeline collectives"
        )
    word = torch.tensor([1 + mine.index(dist.get_rank())], device=_device_of(backend))
    dist.all_reduce(word, group=groups[mine])
    if word.item() != sum(range(1, 1 + len(mine))):
        raise RuntimeError(f"the group of pipeline {list(mine)} adds 1 to {len(mine)} up to {word.item()}")
    return groups[mine]


def _own_pipeline(pipelines: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the one of ``pipelines`` that this process is in."""
    me = dist.get_rank()
    mine = [tuple(pipeline) for pipeline in pipelines if me in pipeline]
    if len(mine) != 1:
        raise ValueError(
            f"global rank {me} is in {len(mine)} of the pipelines {list(map(list, pipelines))}; it must be in one"
        )
    return mine[0]


def _device_of(backend: str) -> torch.device:
    """Returns the device of the tensors that ``backend`` sends."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def rounds(channels: Iterable[Channel]) -> list[list[Channel]]:
    """Returns ``channels`` in rounds in which no rank talks to two others: four for neighbours in any line."""
    result: list[list[Channel]] = []
    busy: list[set[int]] = []
    for channel in sorted(set(channels)):
        ends = {channel.source, channel.destination}
        at = next((at for at, ranks in enumerate(busy) if not ranks & ends), len(busy))
        if at == len(busy):
            busy.append(set())
            result.append([])
        busy[at] |= ends
        result[at].append(channel)
    return result


def _exchange(made: Channels, rank: int, channel: Channel, number: int) -> None:
    """Sends ``number`` over ``channel`` and checks what arrives."""
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


class Transport:
    """The messages of one run of one rank, over :class:`Channels`; make a new one for each run, it costs little.

    Each directed pair of ranks is a channel that keeps its order. A send is posted at once. If two earlier ones to the
    same rank are unfinished then (:data:`.program.SENDS_IN_FLIGHT`), the older one is waited for and its tensor freed.
    So sends hold as much memory as the plan counts (:attr:`.program.Program.messages_held`), however slow a peer is.
    This wait ends: the checker (:mod:`.checker`) lets a rank wait for *all* that it has posted before each action.

    On NCCL a message waits for what the current stream has queued, and its ``wait`` makes the current stream wait, not
    the host. Memory that is freed behind it returns to that stream's pool, where it is reused in the stream's order. A
    posted receive occupies a few multiprocessors until its message comes. Over gloo the host waits, and tensors are
    copied to host memory first.

    Args:
        channels: this process's groups.
        spec: shape, dtype and device of every message of this run.
        collectives: runs collectives; by the spec's device where None.
        shapes: groups of the backend gloo for the same channels. With them each message may have any shape with the
            spec's number of dimensions: hosts send the shape ahead of the tensor. So a host waits where it posts a
            receive, which ends for the same reason.
    """

    def __init__(
        self,
        channels: Channels,
        spec: MessageSpec,
        collectives: CollectiveRunner | None = None,
        shapes: Channels | None = None,
    ) -> None:
        self._channels = channels
        self._spec = spec
        self._moves = spec.device != channels.device
        self._blank = torch.empty(0, dtype=spec.dtype, device=channels.device)
        self._collectives = collectives
        self._sends: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._shapes: Transport | None = None
        if shapes is not None:
            sizes = MessageSpec((len(spec.shape),), torch.int64, torch.device("cpu"))
            self._shapes = Transport(shapes, sizes)

    def send(self, peer: int, tensor: Tensor) -> None:
        """Starts sending ``tensor`` to pipeline rank ``peer``.

        The tensor has no graph behind it, and nothing may write to its storage any more.

        Raises:
            ValueError: ``tensor`` is not as agreed; the other end would read it wrongly.
        """
        shape, dtype, _ = self._spec
        with without_modes():
            fits = tensor.shape == shape if self._shapes is None else tensor.dim() == len(shape)
            if not fits or tensor.dtype != dtype:
                agreed = tuple(shape) if self._shapes is None else f"in {len(shape)} dimensions"
                raise ValueError(f"a message of {dtype} {agreed} was agreed, not {tensor.dtype} {tuple(tensor.shape)}")
            if self._shapes is not None:
                self._shapes.send(peer, torch.tensor(tensor.shape))
            sends = self._sends[peer]
            if len(sends) == SENDS_IN_FLIGHT:
                sends.popleft()[0].wait()
            payload = (tensor.to(self._channels.device) if self._moves else tensor).contiguous()
            sends.append((self._channels.outgoing[peer].send(payload), payload))

    def receive(self, peer: int) -> Pending:
        """Posts the receive of the next message from pipeline rank ``peer``; returns at once, but for ``shapes``."""
        shape = self._spec.shape if self._shapes is None else self._shapes.receive(peer).wait().tolist()
        with without_modes():
            buffer = self._blank.new_empty(shape)
            work = self._channels.incoming[peer].receive(buffer)
        return _Arriving(work, buffer, self._spec.device if self._moves else None)

    def collective(self, chain: Chain) -> Pending:
        """Posts a collective of all ranks of the pipeline, which each post all of theirs in one order.

        ``chain`` is this rank's part; it runs once, after those posted before it.
        """
        if self._collectives is None:
            self._collectives = collectives_on(self._spec.device)
        return self._collectives.post(chain)

    def finish(self) -> None:
        """Waits until every send and every collective has completed; raises the error of any."""
        if self._shapes is not None:
            self._shapes.finish()
        if self._collectives is not None:
            self._collectives.finish()
        for sends in self._sends.values():
            while sends:
                sends.popleft()[0].wait()


class _Arriving(NamedTuple):
    """A posted receive and its buffer, which is ``moved_to`` another device, if to any."""

    work: dist.Work
    buffer: Tensor
    moved_to: torch.device | None

    def wait(self) -> Tensor:
        self.work.wait()
        if self.moved_to is None:
            return self.buffer
        with without_modes():
            return self.buffer.to(self.moved_to)
