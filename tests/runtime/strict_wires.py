"""Threads for ranks, and between them the worst of GPUs: nothing is buffered, and everything waits for the device.

A message is through when both its ends are posted, a collective when all ranks have. Before a rank posts one of
them, starts a reduction or does a pass, it waits until all that it has posted is through, as if its device were
synchronised there, or had one hardware queue.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.programs.program import Channel
from megatron.schedules.runtime.collectives import Chain
from megatron.schedules.runtime.transport import Channels


class StuckError(Exception):
    """Something did not get through in time."""


class Rendezvous:
    """What is through when so many have posted it: a message of two ends, a reduction of all replicas."""

    def __init__(self, ends: int, patience: float) -> None:
        self._missing, self._patience = ends, patience
        self._changed = threading.Condition()

    def arrive(self) -> None:
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._missing <= 0, self._patience):
                raise StuckError

    def is_completed(self) -> bool:
        return self._missing <= 0


class Device:
    """What one rank has posted.

    Args:
        waits: whether everything waits for all of it; otherwise posting never waits.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._posted: list[Rendezvous] = []

    def synchronize(self) -> None:
        """Wait until all that was posted is through."""
        if self._waits:
            for posted in self._posted:
                posted.wait()
            self._posted.clear()

    def post(self, rendezvous: Rendezvous) -> None:
        self.synchronize()
        self._posted.append(rendezvous)
        rendezvous.arrive()


class Wire:
    """A channel without tags: the k-th send matches the k-th receive, whatever they are."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._messages: list[tuple[Rendezvous, list[Tensor]]] = []
        self._ends = [0, 0]
        self._lock = threading.Lock()

    def post(self, end: int, tensor: Tensor, device: Device) -> Rendezvous:
        """Post ``tensor`` as a send (``end`` 0) or as a receive (1)."""
        device.synchronize()
        with self._lock:
            number = self._ends[end]
            self._ends[end] += 1
            if number == len(self._messages):
                self._messages.append((Rendezvous(2, self._patience), []))
            rendezvous, tensors = self._messages[number]
            tensors.insert(end, tensor)
            if len(tensors) == 2:
                sent, received = tensors
                assert sent.shape == received.shape, f"{sent.shape} arrives in {received.shape}"
                received.copy_(sent)
        device.post(rendezvous)
        return rendezvous


class End:
    """A rank's end of a wire, as :class:`megatron.schedules.runtime.transport.ChannelEnd`."""

    def __init__(self, wire: Wire, device: Device) -> None:
        self._wire, self._device = wire, device

    def send(self, tensor: Tensor) -> Rendezvous:
        return self._wire.post(0, tensor, self._device)

    def receive(self, tensor: Tensor) -> Rendezvous:
        return self._wire.post(1, tensor, self._device)


class Collectives:
    """All ranks' collectives: the k-th collective of one rank is the k-th of all."""

    def __init__(self, ranks: int, patience: float) -> None:
        self._ranks, self._patience = ranks, patience
        self._collectives: list[Rendezvous] = []
        self._lock = threading.Lock()

    def collective(self, number: int) -> Rendezvous:
        with self._lock:
            if number == len(self._collectives):
                self._collectives.append(Rendezvous(self._ranks, self._patience))
            return self._collectives[number]


class StrictRunner:
    """A rank's collectives, as :class:`.collectives.CollectiveRunner`; the result of a chain is its own."""

    def __init__(self, all_ranks: Collectives, device: Device) -> None:
        self._all_ranks, self._device = all_ranks, device
        self._posted: list[Rendezvous] = []

    def post(self, chain: Chain) -> Posted:
        self._posted.append(self._all_ranks.collective(len(self._posted)))
        self._device.post(self._posted[-1])
        return Posted(self._posted[-1], chain)

    def finish(self) -> None:
        for collective in self._posted:
            collective.wait()


class Posted:
    """A posted collective."""

    def __init__(self, rendezvous: Rendezvous, chain: Chain) -> None:
        self._rendezvous, self._chain = rendezvous, chain

    def wait(self) -> Tensor:
        self._rendezvous.wait()
        result = self._chain()
        assert result is not None
        return result


class Waiting:
    """Stages, before each of whose passes the device is waited for; their reductions match those of other replicas."""

    def __init__(self, stages: Any, device: Device, reductions: dict[int, Rendezvous] | None = None) -> None:
        self._stages, self._device, self._reductions = stages, device, reductions or {}

    def __getattr__(self, name: str) -> Any:
        self._device.synchronize()
        return getattr(self._stages, name)

    def reduce_gradients(self, stage: int) -> None:
        if stage in self._reductions:
            self._device.post(self._reductions[stage])


def strict_channels(channels: Sequence[Channel], devices: Sequence[Device], patience: float) -> list[Channels]:
    """Every rank's channels over :class:`Wire`."""
    wires = {channel: Wire(patience) for channel in channels}
    return [
        Channels(
            {channel.destination: End(wires[channel], device) for channel in wires if channel.source == rank},  # type: ignore
            {channel.source: End(wires[channel], device) for channel in wires if channel.destination == rank},  # type: ignore
            torch.device("cpu"),
        )
        for rank, device in enumerate(devices)
    ]
