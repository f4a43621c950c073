"""Activations that are away on the host between O and L: what a forward saved, copied there and back.

What autograd saves in chosen parts of a stage's forward goes through hooks (:mod:`.saved_tensors`). When the forward
has ended its copy to the host begins. At O's place the device waits for the copy's end and lets go of what was copied.
At L's place it takes memory again, and the copy back begins; I waits for that. So nothing is let go of while a copy
reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.copies import Copies, CopyWatch
from megatron.schedules.runtime.host_buffers import HostMemory
from megatron.schedules.runtime.saved_tensors import Trip
from megatron.schedules.runtime.weight_gradients import Key


class OffloadError(RuntimeError):
    """Activations could not be taken to the host or back; names stage, microbatch, bytes and what to do, in a line."""


class Offloads:
    """What is, or will be, away of one rank's activations, per (stage, microbatch).

    F runs inside :meth:`forward`, and those parts of it whose activations go inside :meth:`saving`; O is
    :meth:`offload`, L is :meth:`load`, and I or B is preceded by :meth:`arrive`.

    Args:
        copies: carries them out.
        advice: what a reader of an error can do, put at its end.

    Attributes:
        meter: also counts what is held on the device; None (usual in training) counts nothing.
    """

    def __init__(self, copies: Copies, advice: str = "offload less") -> None:
        self.meter: ActivationMeter | None = None
        self._copies, self._advice = copies, advice
        self._memory = HostMemory(copies.allocate)
        # An attribute, not thread-local or context-local, as that of weight gradients.
        self._open: Trip | None = None
        self._trips: dict[Key, Trip] = {}

    @property
    def watch(self) -> CopyWatch | None:
        """Told of the copies that are begun; None (usual) of none."""
        return self._copies.watch

    @watch.setter
    def watch(self, watch: CopyWatch | None) -> None:
        self._copies.watch = watch

    @property
    def host_bytes(self) -> int:
        """All host memory taken; from the second iteration on that stays as it is where sizes do."""
        return self._memory.bytes

    @contextmanager
    def forward(self, stage: int, microbatch: int, given_up: Collection[Tensor] = ()) -> Iterator[None]:
        """Round an F that an O follows: at its end the copies begin.

        Args:
            stage, microbatch: whose.
            given_up: what the caller still holds when this ends but will let go of at once, such as the stage's input.

        Raises:
            OffloadError: there is not so much host memory, or a copy cannot be begun.
        """
        key = stage, microbatch
        self._open = trip = Trip(self._copies, self.meter)
        try:
            yield
        finally:
            self._open = None
        trip.settle(given_up)
        if trip.bytes:
            with self._told(
                key, f"no {_amount(trip.bytes)} of host memory beside the {_amount(self.host_bytes)} taken"
            ):
                block = self._memory.take(trip.bytes)
            with self._told(key, f"the copy of {_amount(trip.bytes)} to the host failed"):
                trip.begin(block)
        self._trips[key] = trip

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Round a part of the forward whose activations go; nothing is done where no :meth:`forward` is open."""
        trip = self._open
        if trip is None:
            yield
            return
        with trip.saving():
            yield

    def offload(self, stage: int, microbatch: int) -> None:
        """O: the device waits for the copy's end, then what was copied is let go of.

        Raises:
            OffloadError: the copy failed.
        """
        trip = self._trip(stage, microbatch)
        with self._told((stage, microbatch), f"the copy of {_amount(trip.bytes)} to the host failed"):
            trip.leave()

    def load(self, stage: int, microbatch: int) -> None:
        """L: take device memory, and begin the copy back.

        Raises:
            OffloadError: the copy cannot be begun.
        """
        trip = self._trip(stage, microbatch)
        with self._told((stage, microbatch), f"the copy of {_amount(trip.bytes)} from the host failed"):
            trip.come_back(self._memory)

    def arrive(self, stage: int, microbatch: int) -> None:
        """Before I or B: what the device does from now on comes after the copy back.

        Raises:
            OffloadError: the copy failed.
            RuntimeError: there was no F inside :meth:`forward`, or no L.
        """
        trip = self._trip(stage, microbatch)
        if trip.bytes and trip.back is None:
            raise RuntimeError(f"the activations of stage {stage}, microbatch {microbatch} are away: no L came before")
        with self._told((stage, microbatch), f"the copy of {_amount(trip.bytes)} from the host failed"):
            trip.arrive()
        if self.watch is not None:
            self.watch.arrived()
        del self._trips[stage, microbatch]

    def assert_empty(self) -> None:
        """Raise RuntimeError if anything is still away."""
        if self._trips:
            raise RuntimeError(f"still on the host: {', '.join(f'{s}F{m}' for s, m in self._trips)}")

    def _trip(self, stage: int, microbatch: int) -> Trip:
        try:
            return self._trips[stage, microbatch]
        except KeyError:
            what = f"nothing of stage {stage}, microbatch {microbatch} goes to the host"
            raise RuntimeError(f"{what}: its forward was not under forward()") from None

    @contextmanager
    def _told(self, key: Key, what: str) -> Iterator[None]:
        """An error inside is told as ``what`` happened to the activations of ``key``."""
        try:
            yield
        except torch.OutOfMemoryError:  # of the device, and says all there is to say
            raise
        except Exception as error:
            stage, microbatch = key
            raise OffloadError(f"stage {stage}, microbatch {microbatch}: {what} ({error}); {self._advice}") from error


def _amount(size: int) -> str:
    return f"{size / 2**20:.4g} MiB"
