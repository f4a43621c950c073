"""An operation's weight gradients, from the I that deferred them to their W."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.function_modes import versions_of
from megatron.schedules.runtime.parameter_leaves import Key
from megatron.schedules.runtime.weight_graph import Closure


class Replayed(NamedTuple):
    """A closure that replays a CUDA graph.

    Args:
        flops: floating point operations of its products.
        gathers: whether it gathers operands, or the operations are not known.
    """

    flops: float = 0.0
    gathers: bool = True


class DeferredGradient(ABC):
    """An operation's weight gradients, waiting; see :meth:`.WeightGradients.add`.

    Every linear of every pass makes one, so what few have is the class's.

    Args:
        key: (stage, microbatch) of the W.
        parameters: the leaf tensors that get the gradients.
        held: the tensors that they are computed from, which do not change until W.

    Attributes:
        key, parameters: as above.
        gathers: whether operands may have to come from other ranks.
        settles: whether it may be computed ahead of W, and is not decided yet.
        computed: whether the expensive part was computed in I.
        finished: whether everything was done ahead of W.
        replays: whether it replays a CUDA graph.
    """

    gathers = settles = computed = finished = replays = _prefetched = False
    _replayed: Replayed | None = None
    _meter: ActivationMeter | None = None
    _hold: Hold | None = None

    def __init__(self, key: Key, parameters: tuple[Tensor, ...], held: Sequence[Tensor]) -> None:
        self.key, self.parameters, self._held = key, parameters, held
        self._versions = versions_of(held)

    @abstractmethod
    def gradients(self) -> Sequence[Tensor | None] | None:
        """Computes the gradients: one for each parameter, or None. Called once; it must not keep them."""

    def gather(self) -> None:
        """Starts the communication that :meth:`gradients` waits for; called once, ahead of it, without grad mode."""
        raise NotImplementedError

    def settled(self, ahead: bool) -> Iterable[Tensor]:
        """Computes the expensive part if ``ahead``, otherwise leaves it; returns the tensors held from then on.

        Called once, no later than the end of I, without grad mode.
        """
        raise NotImplementedError

    def count(self, meter: ActivationMeter) -> None:
        """Counts the held tensors from now on, also those that take their place."""
        self._meter, self._hold = meter, meter.hold(self._held)

    @property
    def alone(self) -> bool:
        """Returns true if it can run before W: it needs no communication, and its size is known."""
        if self._replayed is not None:
            return not self._replayed.gathers
        return self.computed or (not self.gathers and bool(self._held))

    @property
    def flops(self) -> float:
        """Floating point operations of its products: 2 a b for each row of an input (rows, a) and a gradient (rows, b).

        Rows follow from the size of both together. The weights of grouped experts have one shape.
        """
        if self._replayed is not None:
            return self._replayed.flops
        shape = self.parameters[0].shape
        return 0.0 if self.computed else 2.0 * sum(tensor.numel() for tensor in self._held) * shape.numel() / sum(shape)

    def prefetch(self) -> None:
        """Starts its communication; later calls do nothing."""
        if self.gathers and not self._prefetched:
            self._prefetched = True
            with torch.no_grad():
                self.gather()

    def settle(self, ahead: bool) -> bool:
        """Computes ahead of W or decides to wait, on the first call; returns whether this call computed."""
        if not self.settles:
            return False
        if versions_of(self._held) != self._versions:
            self._refuse()
        self.settles = False
        with torch.no_grad():
            self._held = tuple(self.settled(ahead))
        self._versions = versions_of(self._held)
        if self._hold is not None and self._meter is not None:
            self._hold.release()
            self.count(self._meter)
        self.computed = ahead
        return ahead

    def compute(self) -> Sequence[Tensor | None] | None:
        """Returns the gradients; nothing is counted any more.

        Raises:
            RuntimeError: a held tensor was modified.
        """
        if self.finished:
            return None
        if versions_of(self._held) != self._versions:
            self._refuse()
        gradients = self.gradients()
        if self._hold is not None:
            self._hold.release()
        return gradients

    def finish(self) -> None:
        """Frees what it held, done ahead of W. It keeps its place: W gathers for the others at the same points."""
        self.parameters, self._held, self.finished = (), (), True

    def _refuse(self) -> None:
        for tensor, held, now in zip(self._held, self._versions, versions_of(self._held), strict=True):
            if held != now:
                stage, microbatch = self.key
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} held for {stage}W{microbatch} was modified "
                    f"in place after its I: version {held} then, {now} now"
                )


class DeferredClosure(DeferredGradient):
    """Gradients that a function computes; see :meth:`.WeightGradients.defer`."""

    def __init__(
        self,
        key: Key,
        closure: Closure,
        parameters: tuple[Tensor, ...],
        held: Sequence[Tensor],
        replayed: Replayed | None = None,
    ) -> None:
        super().__init__(key, parameters, held)
        self._closure, self._replayed, self.replays = closure, replayed, replayed is not None

    def gradients(self) -> Sequence[Tensor | None] | None:
        closure = self._closure
        del self._closure
        return closure()
