"""Point-to-point messages between threads as NCCL carries them on one hardware queue, nothing buffered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.schedules.runtime.program import Channel
from megatron.schedules.runtime.transport import Channels


class StuckError(Exception):
    """A message did not get through in time."""


class Wire:
    """Both ends of a channel without tags: the k-th send meets the k-th receive, whatever they are.

    Args:
        queue: whether posting waits until the poster's previous message is through.
        patience: seconds until whoever waits raises :class:`StuckError`.
    """

    def __init__(self, queue: bool, patience: float) -> None:
        self._queue, self._patience = queue, patience
        self._ends: tuple[list[Tensor], list[Tensor]] = [], []
        self._through = 0
        self._changed = threading.Condition()

    def send(self, tensor: Tensor) -> Work:
        """As :meth:`megatron.schedules.runtime.transport.End.send`."""
        return self._post(0, tensor)

    def receive(self, tensor: Tensor) -> Work:
        """As :meth:`megatron.schedules.runtime.transport.End.receive`."""
        return self._post(1, tensor)

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` messages are through."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._through >= count, self._patience):
                raise StuckError

    def is_through(self, count: int) -> bool:
        return self._through >= count

    def _post(self, end: int, tensor: Tensor) -> Work:
        """Post ``tensor`` as a send (``end`` 0) or as a receive (1)."""
        with self._changed:
            posted = self._ends[end]
            if self._queue:
                self.wait_for(len(posted))
            posted.append(tensor)
            while self._through < min(map(len, self._ends)):
                sent, received = (tensors[self._through] for tensors in self._ends)
                assert sent.shape == received.shape, f"{sent.shape} arrives in {received.shape}"
                received.copy_(sent)
                self._through += 1
            self._changed.notify_all()
            return Work(self, len(posted))


class Work:
    """What posting hands back."""

    def __init__(self, wire: Wire, count: int) -> None:
        self._wire, self._count = wire, count

    def wait(self) -> None:
        self._wire.wait_for(self._count)

    def is_completed(self) -> bool:
        return self._wire.is_through(self._count)


def strict_channels(channels: Sequence[Channel], ranks: int, *, queue: bool, patience: float) -> list[Channels]:
    """Every rank's channels over :class:`Wire`."""
    wires = {channel: Wire(queue, patience) for channel in channels}
    return [
        Channels(
            {channel.destination: wire for channel, wire in wires.items() if channel.source == rank},  # type: ignore
            {channel.source: wire for channel, wire in wires.items() if channel.destination == rank},  # type: ignore
            torch.device("cpu"),
        )
        for rank in range(ranks)
    ]
