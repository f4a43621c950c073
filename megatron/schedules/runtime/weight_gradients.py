"""The queue of weight gradients whose computation was deferred from I to W."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.deferred_gradient import DeferredClosure, DeferredGradient, Replayed
from megatron.schedules.runtime.parameter_leaves import Key, ParameterLeaves
from megatron.schedules.runtime.weight_graph import Closure, WeightGraph

# Mapped over a queue, a third of the bytecodes of a loop.
_parameters_of, _replays = attrgetter("parameters"), attrgetter("replays")


class WeightGradients:
    """Weight gradients that wait for their W, per (stage, microbatch), in the order in which their I queued them.

    The engine opens a key with ``with store.split(stage, microbatch):`` round the forward, and with
    ``store.input_gradient(stage, microbatch)`` round the I (a recomputed forward runs inside it). An operation that can
    split reads :attr:`current` in its forward, and :attr:`leaves` instead of its parameters. Its backward calls
    :meth:`add` or :meth:`defer` if :meth:`defers` is true, and otherwise computes all gradients. W is :meth:`run`. With
    :attr:`current` None nothing is split.

    Args:
        meter: also counts the tensors that gradients wait with; None (usual in training) counts nothing.
        hooked: whether saved-tensor hooks may surround a forward, as a meter's always may.
        watches_all: see :class:`.ParameterLeaves`.
        volatile: where memory begins that is overwritten between I and W, such as that of CUDA graphs. May grow.

    Attributes:
        current: the (stage, microbatch) whose backward will be split; None outside of :meth:`split`.
    """

    def __init__(
        self,
        meter: ActivationMeter | None = None,
        *,
        hooked: bool = False,
        watches_all: bool = False,
        volatile: set[int] | None = None,
    ) -> None:
        self.volatile: set[int] = set() if volatile is None else volatile
        # By the identities of what they use, which they keep.
        self._graphs: dict[tuple[tuple[int, ...], ...], WeightGraph] | None = None
        self._meter = meter
        self.hooked = hooked or meter is not None
        self._waiting: dict[Key, deque[DeferredGradient]] = {}
        # How many gradients wait to be added to a parameter; None until the first one that may be computed ahead.
        self._adding: Counter[int] | None = None
        self._communicates = False  # whether a gradient ever waited for communication
        self.leaves = ParameterLeaves(watches_all=watches_all)
        # Neither thread-local nor context-local: on a GPU autograd recomputes forwards in a thread of its own, which
        # must see the key too. Passes of one rank never run at the same time.
        self.current: Key | None = None

    def split(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Makes (stage, microbatch) current and opens it: a :meth:`run` must follow, even with nothing deferred.

        A backward in it is user code's, and defers nothing.
        """
        return _Opened(self, (stage, microbatch), self.leaves.forward())

    def input_gradient(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Works like :meth:`split` for the engine's I, which defers."""
        key = stage, microbatch
        return _OpenedByI(self, key, self.leaves.input_gradient(key))

    def defers(self, key: Key) -> bool:
        """Returns whether the backward that runs now is the engine's I of ``key``, and no backward of user code."""
        return self.leaves.deferring == key

    def defer(
        self,
        key: Key,
        closure: Closure,
        held_tensors: Iterable[Tensor] = (),
        *,
        parameters: Sequence[Tensor] = (),
        replayed: Replayed | None = None,
    ) -> None:
        """Queues ``closure`` for the W of ``key``.

        Args:
            key: what :attr:`current` was in the forward.
            closure: runs without grad mode, in a backward. Returns a gradient, or None, for each of ``parameters``,
                which it must not keep; without ``parameters`` it does everything itself.
            held_tensors: the tensors that it reads: counted by the meter, and checked in W for changes in place.
            parameters: the leaf tensors that get the gradients. One that several closures of a key share gets their sum
                at once, so that its hooks fire once a microbatch.
            replayed: what ``closure`` computes, where it replays a graph.

        Raises:
            RuntimeError: ``key`` is not open: its W has run, or its forward was not under :meth:`split`.
        """
        self.add(DeferredClosure(key, closure, tuple(parameters), tuple(held_tensors), replayed))

    def add(self, item: DeferredGradient) -> None:
        """Queues an operation's gradients for the W of their key.

        Raises:
            RuntimeError: see :meth:`defer`.
        """
        queue = self._queue(item.key)
        if self._adding is not None or item.settles:
            self._account(queue, item)
        if item.gathers:
            self._communicates = True
        if self._meter is not None:
            item.count(self._meter)
        queue.append(item)

    def _account(self, queue: deque[DeferredGradient], item: DeferredGradient) -> None:
        """Settles the newest of ``queue``, and counts to which parameters ``item`` will add."""
        if self._adding is None:
            waiting = (each for others in self._waiting.values() for each in others if not each.computed)
            self._adding = Counter(id(parameter) for each in waiting for parameter in each.parameters)
        self._settle_newest(queue)
        _count(self._adding, item, 1)

    def kept(self, operand: Any) -> Any:
        """Returns an operand as it may wait for W: a copy of each tensor in :attr:`volatile` memory."""
        if isinstance(operand, (list, tuple)):
            return [self.kept(part) for part in operand]
        if type(operand) is Tensor and operand.untyped_storage().data_ptr() in self.volatile:
            return operand.clone()
        return operand

    def compute_ahead(self, key: Key) -> None:
        """In I, while the input's gradient is on its way to other ranks: computes the W queued last, if possible.

        It is possible where that one :attr:`.DeferredGradient.settles` and no other waits to be added to the same
        parameter, of whichever microbatch: sums of gradients keep their order.
        """
        queue, adding = self._queue(key), self._adding
        if queue and adding is not None and all(adding[id(parameter)] == 1 for parameter in queue[-1].parameters):
            self._settle_newest(queue, ahead=True)

    def _settle_newest(self, queue: deque[DeferredGradient], *, ahead: bool = False) -> None:
        if queue and queue[-1].settle(ahead) and self._adding is not None:
            _count(self._adding, queue[-1], -1)

    def _end_input_gradient(self, key: Key) -> None:
        self._settle_newest(self._queue(key))
        for parameter, gradient in self.leaves.arrived(key):
            self.defer(key, partial(_computed, [gradient]), parameters=[parameter])

    def prefetch(self, stage: int, microbatch: int) -> None:
        """Starts the first communication of a coming :meth:`run`; may be left out.

        All ranks of a tensor-parallel group must call it at the same point of their programs.
        """
        queue = self._queue((stage, microbatch))
        if self._communicates:
            _prefetch_first(queue)

    def run(self, stage: int, microbatch: int, then: Key | None = None) -> None:
        """W: computes and accumulates all gradients queued for (stage, microbatch), in order, and closes it.

        Args:
            then: key of the next W, if any. It is prefetched behind the last gradient of this one.

        Raises:
            RuntimeError: the key is not open, or a held tensor was modified in place between I and W.
            Exception: whatever a closure raises.
        """
        key = (stage, microbatch)
        queue = self._queue(key)
        if self._communicates and then is not None and all(item.computed for item in queue):
            self.prefetch(*then)
        if queue:
            self._backward(queue, partial(self._take_first, queue, then))
        del self._waiting[key]
        self.leaves.close(key)

    def run_ahead(self, keys: Iterable[Key], flops: float) -> float:
        """Computes and accumulates single gradients of coming W's, in their order, until about ``flops`` are done.

        The last one may be longer than what is left of ``flops``, by half of itself. W does the rest. Left for W are
        gradients that gather operands, because all ranks of a tensor-parallel group must do so at the same point, those
        of a parameter that several operations of a key share, and later ones of the same parameters: sums keep their
        order. So do the graphs of a key, which share memory. Each rank may choose ``flops`` by itself.

        Args:
            keys: whose W comes next, in the order of these W's. Their I must have ended, and no pass before these W's
                may add to the same parameters.
            flops: floating point operations.

        Returns:
            What is left of ``flops``; negative if more was done.
        """
        left: set[int] = set()
        for key in keys:
            queue = self._queue(key)
            uses = Counter(id(parameter) for item in queue for parameter in item.parameters)
            graph_left = False
            for item in queue:
                own = {id(parameter) for parameter in item.parameters}
                waits = not item.alone or (graph_left and item.replays)
                if waits or not left.isdisjoint(own) or any(uses[parameter] > 1 for parameter in own):
                    left |= own
                    graph_left |= item.replays
                elif own:
                    if flops < item.flops / 2:
                        return flops
                    flops -= item.flops
                    # A forward's autocast does not concern W.
                    with torch.autocast(item.parameters[0].device.type, enabled=False), self.leaves.outside():
                        self._backward((item,), partial(self._take, item))
                    item.finish()
        return flops

    def flops(self, stage: int, microbatch: int) -> float:
        """Floating point operations of the products that (stage, microbatch) left to its W and that still wait."""
        waiting = self._waiting.get((stage, microbatch), ())
        return sum(item.flops for item in waiting if item.parameters)

    def waiting(self, stage: int, microbatch: int) -> int:
        """Number of operations whose gradients are queued for (stage, microbatch)."""
        return sum(not item.finished for item in self._waiting.get((stage, microbatch), ()))

    def parameters(self, stage: int, microbatch: int) -> set[Tensor]:
        """Returns the parameters that the W of (stage, microbatch) gives gradients to."""
        return {parameter for item in self._waiting.get((stage, microbatch), ()) for parameter in item.parameters}

    def assert_empty(self) -> None:
        """Raises RuntimeError if any opened (stage, microbatch) has not had its W."""
        if self._waiting:
            left = ", ".join(f"{s}W{m} ({len(queue)} queued)" for (s, m), queue in self._waiting.items())
            raise RuntimeError(f"weight gradients not computed: {left}")

    @contextmanager
    def keeping_graphs(self) -> Iterator[None]:
        """Surrounds one call of a schedule, in which the W's of a stage share a graph, as nearly all are alike.

        Its forwards share leaves. A graph holds the parameters, their dtype, and whether they are trained; hooks are
        those of each W.
        """
        self._graphs = {}
        try:
            with self.leaves.sharing():
                yield
        finally:
            self._graphs = None

    def _backward(self, items: Collection[DeferredGradient], compute: Closure) -> None:
        graphs = {} if self._graphs is None else self._graphs
        uses, replays = tuple(map(_parameters_of, items)), tuple(map(_replays, items))
        which = (tuple(map(len, uses)), tuple(map(id, chain.from_iterable(uses))), replays)
        if (graph := graphs.get(which)) is None:
            # CUDA graphs share the memory of their gradients.
            graph = graphs[which] = WeightGraph(uses, last=replays)
        graph.run(compute)

    def _take_first(self, queue: deque[DeferredGradient], then: Key | None) -> Sequence[Tensor | None] | None:
        """Removes the first of ``queue``, frees all it held, and returns its gradients."""
        item = queue.popleft()
        if self._communicates and not item.computed:
            item.prefetch()
            if not _prefetch_first(queue) and then is not None:
                self.prefetch(*then)
        return self._take(item)

    def _take(self, item: DeferredGradient) -> Sequence[Tensor | None] | None:
        if self._adding is not None and not item.computed:
            _count(self._adding, item, -1)
        return item.compute()

    def _queue(self, key: Key) -> deque[DeferredGradient]:
        try:
            return self._waiting[key]
        except KeyError:
            raise RuntimeError(
                f"no split backward is open for stage {key[0]}, microbatch {key[1]}: "
                "its forward was not under split(), or its W has already run"
            ) from None


class _Opened:
    """Makes a key current; ``backwards`` says who runs the backwards meanwhile.

    A class, as contexts of functions take the host twice as long.
    """

    __slots__ = ("_backwards", "_key", "_outer", "_store")

    def __init__(self, store: WeightGradients, key: Key, backwards: AbstractContextManager[None]) -> None:
        self._store, self._key, self._backwards = store, key, backwards

    def __enter__(self) -> None:
        store, key = self._store, self._key
        self._backwards.__enter__()
        self._outer, store.current = store.current, key
        store._waiting.setdefault(key, deque())

    def __exit__(self, *error: Any) -> None:
        try:
            self._backwards.__exit__(*error)
        finally:
            self._store.current = self._outer


class _OpenedByI(_Opened):
    """Also defers what I has left in leaves."""

    __slots__ = ()

    def __exit__(self, kind: Any, *error: Any) -> None:
        try:
            if kind is None:
                self._store._end_input_gradient(self._key)
        finally:
            super().__exit__(kind, *error)


def _count(adding: Counter[int], item: DeferredGradient, change: int) -> None:
    for parameter in item.parameters:
        adding[id(parameter)] += change


def _prefetch_first(queue: deque[DeferredGradient]) -> bool:
    """Starts the communication of the first that still has to compute; returns whether there is one."""
    for item in queue:
        if not item.computed:
            item.prefetch()
            return True
    return False


def _computed(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Closure of gradients that are already computed."""
    return gradients
