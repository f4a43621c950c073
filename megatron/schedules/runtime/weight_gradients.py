"""The queue of weight gradients whose computing was put off from I to W."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold

Key = tuple[int, int]
"""(stage, microbatch)."""

Closure = Callable[[], Sequence[Tensor | None] | None]
"""Computes one operation's weight gradients: one for each parameter it was deferred with, or nothing."""

# A backward costs some 30 microseconds to start, more than a small gradient takes to compute; so gradients
# are handed over together until there are this many bytes, which is nothing to the memory of a model.
_DELIVERY_BYTES = 1 << 24


class WeightGradients:
    """Weight gradients that wait for their W, per (stage, microbatch), in the order their I queued them.

    The engine opens a key with ``with store.split(stage, microbatch):`` round the forward, and again round
    the I (a recomputed forward runs inside it); operations that can split read :attr:`current` in their
    forward and call :meth:`defer` in their backward; W is :meth:`run`. With :attr:`current` None nothing is
    split.

    Args:
        meter: also counts the tensors that waiting closures hold; None (usual in training) counts nothing.
    """

    def __init__(self, meter: ActivationMeter | None = None) -> None:
        self._meter = meter
        self._waiting: dict[Key, deque[_Deferred]] = {}
        # An attribute, not thread-local or context-local: on a GPU autograd recomputes forwards in a thread
        # of its own, and they must see the key too. Passes of one rank never run at the same time.
        self._current: Key | None = None

    @property
    def current(self) -> Key | None:
        """The (stage, microbatch) whose backward will be split, or None outside :meth:`split`."""
        return self._current

    @contextmanager
    def split(self, stage: int, microbatch: int) -> Iterator[None]:
        """Make (stage, microbatch) current and open it: a :meth:`run` is owed, even with nothing deferred."""
        outer = self._current
        self._current = (stage, microbatch)
        self._waiting.setdefault(self._current, deque())
        try:
            yield
        finally:
            self._current = outer

    def defer(
        self,
        key: Key,
        closure: Closure,
        held_tensors: Iterable[Tensor] = (),
        *,
        parameters: Sequence[Tensor] = (),
        prefetch: Callable[[], None] | None = None,
    ) -> None:
        """Queue ``closure`` for the W of ``key``.

        Args:
            key: what :attr:`current` was in the forward.
            closure: runs under ``no_grad``. With ``parameters`` it returns a gradient for each, in order,
                which it must not keep; None delivers nothing. Without, it does everything itself and returns
                None.
            held_tensors: the activations and gradients it reads: counted by the meter and, in W, checked not
                to have been modified in place since now.
            parameters: the leaf tensors that get the gradients. One that several closures of a key share gets
                their sum in one piece, so that its hooks fire once a microbatch, as in a whole backward.
            prefetch: starts whatever communication ``closure`` waits for. Called once, under ``no_grad``,
                before ``closure``; in :meth:`run` while the closure ahead of it computes.

        Raises:
            RuntimeError: ``key`` is not open: its W has already run, or its forward was not under
                :meth:`split`.
        """
        tensors = tuple(held_tensors)
        versions = tuple(tensor._version for tensor in tensors)
        hold = self._meter.hold(tensors) if self._meter is not None else None
        self._queue(key).append(_Deferred(closure, tuple(parameters), tensors, versions, hold, _Once(prefetch)))

    def prefetch(self, stage: int, microbatch: int) -> None:
        """Start the communication of the first closure of a coming :meth:`run`; may be left out.

        All ranks of a tensor-parallel group must call it at the same point of their programs.
        """
        queue = self._queue((stage, microbatch))
        if queue:
            with torch.no_grad():
                queue[0].prefetch()

    def run(self, stage: int, microbatch: int) -> None:
        """W: compute and deliver all gradients queued for (stage, microbatch), in queued order, and close it.

        Raises:
            RuntimeError: the key is not open, or a held tensor was modified in place between I and W.
        """
        key = (stage, microbatch)
        queue = self._queue(key)
        delivery = _Delivery(queue)
        # Under grad mode each .grad would get a grad_fn that keeps the inputs alive, a leak of a forward's
        # worth of memory each microbatch.
        with torch.no_grad():
            while queue:
                item = queue.popleft()
                item.prefetch()
                if queue:
                    queue[0].prefetch()
                item.check_versions(key)
                delivery.take(item.parameters, item.closure() or ())
                if item.hold is not None:
                    item.hold.release()
                # Before the next gradient is computed, this one's inputs and outputs must be free.
                del item
            delivery.send()
        del self._waiting[key]

    def waiting(self, stage: int, microbatch: int) -> int:
        """How many closures are queued for (stage, microbatch)."""
        return len(self._waiting.get((stage, microbatch), ()))

    def assert_empty(self) -> None:
        """Raise RuntimeError if any opened (stage, microbatch) has not had its W."""
        if self._waiting:
            left = ", ".join(f"{s}W{m} ({len(queue)} queued)" for (s, m), queue in self._waiting.items())
            raise RuntimeError(f"weight gradients not computed: {left}")

    def _queue(self, key: Key) -> deque[_Deferred]:
        try:
            return self._waiting[key]
        except KeyError:
            raise RuntimeError(
                f"no split backward is open for stage {key[0]}, microbatch {key[1]}: "
                "its forward was not under split(), or its W has already run"
            ) from None


class _Once:
    """A call made at most once."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None] | None) -> None:
        self._call = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class _Deferred(NamedTuple):
    """One operation's weight gradients, waiting."""

    closure: Closure
    parameters: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    hold: Hold | None
    prefetch: _Once

    def check_versions(self, key: Key) -> None:
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} held for {key[0]}W{key[1]} was modified "
                    f"in place after its I: version {version} then, {tensor._version} now"
                )


class _Delivery:
    """Gradients of one W on the way to their parameters; they wait for company only while they are small."""

    def __init__(self, queue: Iterable[_Deferred]) -> None:
        self._uses = Counter(id(parameter) for item in queue for parameter in item.parameters)
        self._sums: dict[int, Tensor] = {}
        self._ready: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add one closure's gradients; a parameter's is ready to send once no later closure uses it."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = id(parameter)
            self._uses[name] -= 1
            earlier = self._sums.pop(name, None)
            if earlier is not None:
                gradient = earlier if gradient is None else earlier.add_(gradient)
            if gradient is None:
                continue
            if self._uses[name]:
                self._sums[name] = gradient
            else:
                self._ready.append((parameter, gradient))
                self._bytes += gradient.nbytes
        if self._bytes >= _DELIVERY_BYTES:
            self.send()

    def send(self) -> None:
        """Deliver what is ready."""
        ready, self._ready, self._bytes = self._ready, [], 0
        if ready:
            deliver([parameter for parameter, _ in ready], [gradient for _, gradient in ready])


def deliver(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Hand finished gradients to leaf parameters as a backward does: accumulated in ``.grad``, hooks fired.

    Hooks on the parameter's gradient accumulator run too, which is where Megatron's data parallelism adds to
    ``main_grad`` and starts its reductions. Gradients are cast to the parameter's dtype as autograd does.

    Args:
        parameters: leaves that require grad.
        gradients: of the same shapes; given away, ``.grad`` may become one of them.
    """
    with torch.enable_grad():
        root = _Handover.apply(gradients, *parameters)
    torch.autograd.backward(root, root.detach())


class _Handover(torch.autograd.Function):
    """Nothing as a function of parameters, whose backward brings gradients that are there already.

    One root for all of them: a backward checks each root, which takes longer than a small gradient's product. What
    comes out are new tensors on the gradients' memory, so that ``.grad`` becomes one without a copy, which is not done
    to tensors that others may see.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient.detach() for gradient in ctx.gradients)
