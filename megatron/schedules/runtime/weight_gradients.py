"""The queue of weight gradients whose computing was put off from I to W."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold

Key = tuple[int, int]
"""(stage, microbatch)."""

Closure = Callable[[], Sequence[Tensor | None] | None]
"""Computes one operation's weight gradients: one for each parameter it was deferred with, or nothing."""

Settle = Callable[[bool], Iterable[Tensor]]
"""With True computes all of a closure that takes long, with False has it wait; returns what it holds from then on."""

# How many graphs are kept. A stage queues the same closures for each microbatch, but for experts that get no token.
_GRAPHS = 64


class WeightGradients:
    """Weight gradients that wait for their W, per (stage, microbatch), in the order their I queued them.

    The engine opens a key with ``with store.split(stage, microbatch):`` round the forward, and again round
    the I (a recomputed forward runs inside it); operations that can split read :attr:`current` in their
    forward and call :meth:`defer` in their backward; W is :meth:`run`. With :attr:`current` None nothing is
    split.

    Args:
        meter: also counts the tensors that waiting closures hold; None (usual in training) counts nothing.
        hooked: whether hooks may be round what any forward saves, as a meter's always may.
    """

    def __init__(self, meter: ActivationMeter | None = None, *, hooked: bool = False) -> None:
        self._meter = meter
        self.hooked = hooked or meter is not None
        self._waiting: dict[Key, deque[_Deferred]] = {}
        # How many closures wait to add to a parameter.
        self._adding: Counter[int] = Counter()
        self._graph = lru_cache(_GRAPHS)(_Graph)
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
            self._settle_newest(self._waiting.get((stage, microbatch), deque()))
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
        settle: Settle | None = None,
    ) -> None:
        """Queue ``closure`` for the W of ``key``.

        Args:
            key: what :attr:`current` was in the forward.
            closure: runs without grad mode, in a backward. With ``parameters`` it returns a gradient for each,
                in order, which it must not keep, or None for no gradient. Without, it does everything itself and
                returns None.
            held_tensors: the activations and gradients it reads: counted by the meter and, in W, checked not
                to have been modified in place since now.
            parameters: the leaf tensors that get the gradients. One that several closures of a key share gets
                their sum in one piece, so that its hooks fire once a microbatch, as in a whole backward.
            prefetch: starts whatever communication ``closure`` waits for. Called once, without grad mode,
                before ``closure``; in :meth:`run` before the closure ahead of it computes.
            settle: may compute ahead of W, see :meth:`compute_ahead`. Called once, no later than the end of I.

        Raises:
            RuntimeError: ``key`` is not open: its W has already run, or its forward was not under
                :meth:`split`.
        """
        queue = self._queue(key)
        self._settle_newest(queue)
        queue.append(_Deferred(key, closure, tuple(parameters), _Once(prefetch), settle, self._meter))
        queue[-1].keep(held_tensors)
        self._count(queue[-1], 1)

    def compute_ahead(self, key: Key) -> None:
        """In I, while the input's gradient is on its way to other ranks: compute the W queued last, where that can be.

        It can where the closure was deferred with ``settle``. The sums of gradients keep their order of addition: where
        another closure waits to add to the same parameter, of whichever microbatch, this one waits behind it.
        """
        queue = self._queue(key)
        if queue and all(self._adding[id(parameter)] == 1 for parameter in queue[-1].parameters):
            self._settle_newest(queue, ahead=True)

    def _settle_newest(self, queue: deque[_Deferred], *, ahead: bool = False) -> None:
        if queue and queue[-1].settle(ahead):
            self._count(queue[-1], -1)

    def _count(self, item: _Deferred, one: int) -> None:
        for parameter in item.parameters:
            self._adding[id(parameter)] += one

    def prefetch(self, stage: int, microbatch: int) -> None:
        """Start the first communication of a coming :meth:`run`; may be left out.

        All ranks of a tensor-parallel group must call it at the same point of their programs.
        """
        _prefetch_first(self._queue((stage, microbatch)))

    def run(self, stage: int, microbatch: int, then: Key | None = None) -> None:
        """W: compute and accumulate all gradients queued for (stage, microbatch), in queued order, and close it.

        Args:
            stage, microbatch: whose W.
            then: whose W comes next, if that is known: prefetched behind the last that this one computes.

        Raises:
            RuntimeError: the key is not open, or a held tensor was modified in place between I and W.
            Exception: whatever a closure raises.
        """
        key = (stage, microbatch)
        queue = self._queue(key)
        if then is not None and all(item.computed for item in queue):
            self.prefetch(*then)
        if queue:
            self._graph(tuple(item.parameters for item in queue)).backward(partial(self._take_first, queue, then))
        del self._waiting[key]

    def waiting(self, stage: int, microbatch: int) -> int:
        """How many closures are queued for (stage, microbatch)."""
        return len(self._waiting.get((stage, microbatch), ()))

    def parameters(self, stage: int, microbatch: int) -> set[Tensor]:
        """The parameters that the W of (stage, microbatch) gives gradients to."""
        return {parameter for item in self._waiting.get((stage, microbatch), ()) for parameter in item.parameters}

    def assert_empty(self) -> None:
        """Raise RuntimeError if any opened (stage, microbatch) has not had its W."""
        if self._waiting:
            left = ", ".join(f"{s}W{m} ({len(queue)} queued)" for (s, m), queue in self._waiting.items())
            raise RuntimeError(f"weight gradients not computed: {left}")

    def _take_first(self, queue: deque[_Deferred], then: Key | None) -> Sequence[Tensor | None] | None:
        """The gradients of the first closure of ``queue``, which is then gone with all it held."""
        item = queue.popleft()
        if not item.computed:
            self._count(item, -1)
            item.prefetch()
            if not _prefetch_first(queue) and then is not None:
                self.prefetch(*then)
        item.check_versions()
        gradients = item.closure()
        item.release()
        return gradients

    def _queue(self, key: Key) -> deque[_Deferred]:
        try:
            return self._waiting[key]
        except KeyError:
            raise RuntimeError(
                f"no split backward is open for stage {key[0]}, microbatch {key[1]}: "
                "its forward was not under split(), or its W has already run"
            ) from None


def _prefetch_first(queue: deque[_Deferred]) -> bool:
    """Start the communication of the first closure that still has to compute; whether there is such a one."""
    first = next((item for item in queue if not item.computed), None)
    if first is None:
        return False
    if first.prefetch.due:
        with torch.no_grad():
            first.prefetch()
    return True


class _Once:
    """A call made at most once."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None] | None) -> None:
        self._call = call

    @property
    def due(self) -> bool:
        """Whether there is a call still to be made."""
        return self._call is not None

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class _Deferred:
    """One operation's weight gradients, waiting; :meth:`WeightGradients.defer` says what each part is."""

    def __init__(
        self,
        key: Key,
        closure: Closure,
        parameters: tuple[Tensor, ...],
        prefetch: _Once,
        settle: Settle | None,
        meter: ActivationMeter | None,
    ) -> None:
        self.closure, self.parameters, self.prefetch = closure, parameters, prefetch
        # Whether all that takes long has been done, in I.
        self.computed = False
        self._key, self._settle, self._meter = key, settle, meter
        self._held: list[tuple[Tensor, int]] = []
        self._hold: Hold | None = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count and watch these from now on, in place of those before."""
        self.release()
        self._held = [(tensor, tensor._version) for tensor in tensors]
        if self._meter is not None:
            self._hold = self._meter.hold(tensor for tensor, _ in self._held)

    def settle(self, ahead: bool) -> bool:
        """Compute now what can be computed ahead of W, or let it wait; returns whether it was computed by this call."""
        if self._settle is None:
            return False
        self.check_versions()
        settle, self._settle = self._settle, None
        with torch.no_grad():
            self.keep(settle(ahead))
        self.computed = ahead
        return ahead

    def check_versions(self) -> None:
        for tensor, version in self._held:
            if tensor._version != version:
                stage, microbatch = self._key
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} held for {stage}W{microbatch} was modified "
                    f"in place after its I: version {version} then, {tensor._version} now"
                )

    def release(self) -> None:
        if self._hold is not None:
            self._hold.release()


class _Graph:
    """A backward that computes the gradients of a queue's closures, one closure after another.

    A node for each closure leads to its parameters and to the next node, and autograd goes to parameters first. So a
    gradient is accumulated, with the hooks of its parameter, before the next one is computed: while it is still in
    the caches, and never two of them in memory. Where closures share a parameter autograd adds up theirs, and its
    hooks fire once. Gradients are cast to the parameter's dtype.

    Building it takes some hundred microseconds, so it is used again for every microbatch. On a GPU it runs in
    autograd's own thread, as whole backwards do, and on the stream that was current when it was built.

    Args:
        uses: the parameters of each closure, in order.
    """

    def __init__(self, uses: tuple[tuple[Tensor, ...], ...]) -> None:
        self._compute: list[Closure] = []
        device = next((parameter.device for parameters in uses for parameter in parameters), None)
        following = torch.empty(0, device=device, requires_grad=True)
        with torch.enable_grad():
            for parameters in reversed(uses):
                following = _Node.apply(self._compute, following, *parameters)
        self._root, self._nothing = following, following.detach()

    def backward(self, compute: Closure) -> None:
        """Run it; ``compute`` gives the gradients of one closure after another."""
        self._compute.append(compute)
        try:
            torch.autograd.backward(self._root, self._nothing, retain_graph=True)
        finally:
            self._compute.pop()


class _Node(torch.autograd.Function):
    """Nothing as a function of a closure's parameters and of the node that follows, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, compute: list[Closure], following: Tensor, *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.set_materialize_grads(False)
        return following.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.compute[-1]() or ())
