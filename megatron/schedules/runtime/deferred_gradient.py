"""One operation's weight gradients, from the I that deferred them to their W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.function_modes import without_modes
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
    """One operation's weight gradients, waiting; see :meth:`.WeightGradients.defer`."""

    __slots__ = (
        *("_gathers", "_held", "_hold", "_key", "_meter", "_prefetch", "_replayed", "_settle", "_versions"),
        *("closure", "computed", "finished", "parameters"),
    )

    def __init__(
        self,
        key: Key,
        closure: Closure,
        parameters: tuple[Tensor, ...],
        prefetch: Callable[[], None] | None,
        settle: Settle | None,
        meter: ActivationMeter | None,
        replayed: Replayed | None,
    ) -> None:
        self.closure, self.parameters = closure, parameters
        # Whether the expensive part was computed in I, and whether everything was done ahead of W.
        self.computed = self.finished = False
        self._gathers, self._replayed = prefetch is not None, replayed
        self._key, self._prefetch, self._settle, self._meter = key, prefetch, settle, meter
        self._held: Sequence[Tensor] = ()
        self._versions: list[int] = []
        self._hold: Hold | None = None

    @property
    def alone(self) -> bool:
        """Returns true if it can run before W: it needs no communication, and its size is known."""
        if self._replayed is not None:
            return not self._replayed.gathers
        return self.computed or (not self._gathers and bool(self._held))

    @property
    def replays(self) -> bool:
        """Returns whether it replays a CUDA graph."""
        return self._replayed is not None

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

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts and watches these from now on, in place of those before."""
        self._held = tuple(tensors)
        self._versions = _versions(self._held)
        if self._meter is not None:
            self.release()
            self._hold = self._meter.hold(self._held)

    def settle(self, ahead: bool) -> bool:
        """Computes ahead of W or decides to wait, on the first call; returns whether this call computed."""
        if self._settle is None:
            return False
        self.check_versions()
        settle, self._settle = self._settle, None
        with torch.no_grad():
            self.hold(settle(ahead))
        self.computed = ahead
        return ahead

    def check_versions(self) -> None:
        """Raises RuntimeError if a held tensor was modified."""
        versions = _versions(self._held)
        if versions == self._versions:
            return
        for tensor, held, now in zip(self._held, self._versions, versions, strict=True):
            if held != now:
                stage, microbatch = self._key
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} held for {stage}W{microbatch} was modified "
                    f"in place after its I: version {held} then, {now} now"
                )

    def release(self) -> None:
        if self._hold is not None:
            self._hold.release()


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    with without_modes():
        return [tensor._version for tensor in tensors]


def _nothing() -> None:
    """Closure of gradients that are already accumulated."""
