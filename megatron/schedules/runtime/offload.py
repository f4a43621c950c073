"""Activations that are offloaded to the host between O and L.

What autograd saves in chosen parts of a stage's forward goes through hooks (:mod:`.saved_tensors`). When the forward
has ended, its copy to the host begins. At O the device waits for the copy's end and frees what was copied. At L it
allocates memory, and the copy back begins; I waits for that. So no memory is freed while a copy reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.copies import Copies
from megatron.schedules.runtime.host_buffers import HostMemory
from megatron.schedules.runtime.saved_tensors import OffloadedForward
from megatron.schedules.runtime.weight_gradients import Key


class OffloadError(RuntimeError):
    """A failed copy to or from the host; names stage, microbatch, bytes and what to do, in one line."""


class Offloads:
    """The offloaded activations of one rank, per (stage, microbatch).

    F runs inside :meth:`forward`, and those parts of it whose activations are offloaded inside :meth:`saving`; O is
    :meth:`offload`, L is :meth:`load`, and :meth:`arrive` comes before I or B. They raise OffloadError where a copy
    fails or host memory is short.

    Args:
        copies: carries out the copies.
        advice: what a reader of an error can do, put at its end.

    Attributes:
        moved: for each (stage, microbatch), bytes that left the device in its latest forward, by part of the forward.
        meter: also counts what is on the device; None (usual in training) counts nothing.
    """

    def __init__(self, copies: Copies, advice: str = "offload less") -> None:
        self.meter: ActivationMeter | None = None
        self.copies, self._advice = copies, advice
        self._memory = HostMemory(copies.allocate)
        # An attribute, neither thread-local nor context-local: see WeightGradients.
        self._open: OffloadedForward | None = None
        self._forwards: dict[Key, OffloadedForward] = {}
        self.moved: dict[Key, list[int]] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory allocated so far, bytes. Constant from the second iteration on if sizes are."""
        return self._memory.bytes

    @contextmanager
    def forward(self, stage: int, microbatch: int, freed_soon: Collection[Tensor] = ()) -> Iterator[None]:
        """Surrounds an F that an O follows; at its end the copies begin.

        Args:
            freed_soon: what the caller still holds at the end but frees at once, such as the stage's input.
        """
        self._open = forward = OffloadedForward(self.copies, self.meter)
        try:
            yield
        finally:
            self._open = None
        forward.choose(freed_soon)
        self.moved[stage, microbatch] = forward.moved
        self._forwards[stage, microbatch] = forward
        if forward.bytes:
            missing = f"no {_mib(forward.bytes)} of host memory beside the {_mib(self.host_bytes)} allocated"
            with self._named(stage, microbatch, missing):
                block = self._memory.take(forward.bytes)
            with self._copying(stage, microbatch, "to"):
                forward.copy_out(block)

    def saving(self) -> AbstractContextManager[None]:
        """Surrounds a part of the forward whose activations are offloaded; does nothing outside :meth:`forward`."""
        return nullcontext() if self._open is None else self._open.saving()

    def offload(self, stage: int, microbatch: int) -> None:
        """O: the device waits for the copy's end, then what was copied is freed."""
        with self._copying(stage, microbatch, "to") as forward:
            forward.free()

    def load(self, stage: int, microbatch: int) -> None:
        """L: allocates device memory and begins the copy back."""
        with self._copying(stage, microbatch, "from") as forward:
            forward.copy_back(self._memory)

    def arrive(self, stage: int, microbatch: int) -> None:
        """Before I or B: makes all further work of the device wait for the copy back.

        Raises:
            RuntimeError: there was no F inside :meth:`forward`, or no L.
        """
        with self._copying(stage, microbatch, "from") as forward:
            if forward.back is not None:
                forward.back.wait()
        if forward.bytes and forward.back is None:
            raise RuntimeError(
                f"the activations of stage {stage}, microbatch {microbatch} are offloaded: no L came before"
            )
        if self.copies.watch is not None:
            self.copies.watch.arrived()
        del self._forwards[stage, microbatch]

    def assert_empty(self) -> None:
        """Raises RuntimeError if anything is still offloaded."""
        if self._forwards:
            raise RuntimeError(f"still on the host: {', '.join(f'{s}F{m}' for s, m in self._forwards)}")

    @contextmanager
    def _copying(self, stage: int, microbatch: int, way: str) -> Iterator[OffloadedForward]:
        """Yields the forward, for a step of its copy ``way`` the host."""
        forward = self._forwards.get((stage, microbatch))
        if forward is None:
            what = f"nothing of stage {stage}, microbatch {microbatch} is offloaded"
            raise RuntimeError(f"{what}: its forward was not under forward()")
        with self._named(stage, microbatch, f"the copy of {_mib(forward.bytes)} {way} the host failed"):
            yield forward

    @contextmanager
    def _named(self, stage: int, microbatch: int, what: str) -> Iterator[None]:
        """Raises errors inside as OffloadError, which says ``what`` happened to these activations."""
        try:
            yield
        except torch.OutOfMemoryError:  # of the device, and says all there is to say
            raise
        except Exception as error:
            raise OffloadError(f"stage {stage}, microbatch {microbatch}: {what} ({error}); {self._advice}") from error


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g} MiB"
