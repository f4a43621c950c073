"""One operation's weight gradients, from the I that deferred them to their W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.function_modes import versions_of
from megatron.schedules.runtime.parameter_leaves import Key
from megatron.schedules.runtime.weight_graph import Closure

Settle = Callable[[bool], Iterable[Tensor]]
"""With True computes the expensive part of a closure, with False leaves it; returns the tensors held from then on."""


class Replayed(NamedTuple):
    """A closure that replays a CUDA graph.

    Args:
        flops: floating point operations of its products.
        gathers: whether it gathers operands, or the operations are not known.
    """

    flops: float = 0.0
    gathers: bool = True


class DeferredGradient:
    """One operation's weight gradients, waiting; see :meth:`.WeightGradients.defer`.

    Every linear of every pass makes one, so what few have is the class's.

    Attributes:
        computed: whether the expensive part was computed in I.
        finished: whether everything was done ahead of W.
        replays: whether it replays a CUDA graph.
    """

    computed = finished = replays = False
    _gathers = False
    _prefetch: Callable[[], None] | None = None
    _settle: Settle | None = None
    _replayed: Replayed | None = None
    _meter: ActivationMeter | None = None
    _hold: Hold | None = None

    def __init__(self, key: Key, closure: Closure, parameters: tuple[Tensor, ...], held: Sequence[Tensor]) -> None:
        self._key, self.closure, self.parameters, self._held = key, closure, parameters, held
        self._versions = versions_of(held)

    def extend(self, prefetch: Callable[[], None] | None, settle: Settle | None, replayed: Replayed | None) -> None:
        """Sets what :meth:`.WeightGradients.defer` got besides."""
        self._prefetch, self._settle, self._replayed = prefetch, settle, replayed
        self._gathers, self.replays = prefetch is not None, replayed is not None

    def count(self, meter: ActivationMeter) -> None:
        """Counts the held tensors from now on, also those that take their place."""
        self._meter, self._hold = meter, meter.hold(self._held)

    @property
    def alone(self) -> bool:
        """Returns true if it can run before W: it needs no communication, and its size is known."""
        if self._replayed is not None:
            return not self._replayed.gathers
        return self.computed or (not self._gathers and bool(self._held))

    @property
    def flops(self) -> float:
        """Floating point operations of its products: 2 a b for each row of an input (rows, a) and a gradient (rows, b).

        Rows follow from the size of both together. The weights of grouped experts have one shape.
        """
        if self._replayed is not None:
            return self._replayed.flops
        shape = self.parameters[0].shape
        return 0.0 if self.computed else 2.0 * sum(tensor.numel() for tensor in self._held) * shape.numel() / sum(shape)

    def finish(self) -> None:
        """Frees it, done ahead of W. It keeps its place, so that W gathers for the others at the same points."""
        self.closure, self.parameters, self._held, self._versions, self.finished = _nothing, (), (), [], True

    def prefetch(self) -> None:
        """Starts its communication; later calls do nothing."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            with torch.no_grad():
                prefetch()

    def settle(self, ahead: bool) -> bool:
        """Computes ahead of W or decides to wait, on the first call; returns whether this call computed."""
        if self._settle is None:
            return False
        self._check_versions()
        settle, self._settle = self._settle, None
        with torch.no_grad():
            self._held = tuple(settle(ahead))
        self._versions = versions_of(self._held)
        if self._hold is not None and self._meter is not None:
            self._hold.release()
            self.count(self._meter)
        self.computed = ahead
        return ahead

    def compute(self) -> Sequence[Tensor | None] | None:
        """Returns the gradients; nothing is held any more.

        Raises:
            RuntimeError: a held tensor was modified.
        """
        self._check_versions()
        gradients = self.closure()
        if self._hold is not None:
            self._hold.release()
        return gradients

    def _check_versions(self) -> None:
        versions = versions_of(self._held)
        if versions == self._versions:
            return
        for tensor, held, now in zip(self._held, self._versions, versions, strict=True):
            if held != now:
                stage, microbatch = self._key
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} held for {stage}W{microbatch} was modified "
                    f"in place after its I: version {held} then, {now} now"
                )


def _nothing() -> None:
    """Closure of gradients that are already accumulated."""
