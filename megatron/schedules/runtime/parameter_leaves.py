"""Leaves that take parameters' places in split forwards, and backwards that user code runs itself.

A split operation must not lead autograd to its parameters: I would run their hooks without their gradients. So it reads
a leaf with the same memory instead. In the engine's I the leaf gets nothing, because the operation defers its weight
gradient. A forward, a loss or a hook may run a backward of its own: an adversarial step, a gradient penalty, the
gradient of each of several losses at a weight. That one defers nothing. What arrives at a leaf then belongs to its
parameter, and whoever asks for the parameter's gradient gets the leaf's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from itertools import repeat
from operator import add, attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.function_modes import without_modes
from megatron.schedules.runtime.user_backwards import Seeing, engine

Key = tuple[int, int]
"""(stage, microbatch)."""

Switch = Callable[[bool], None]
"""Prepares a backward that defers its weight gradients, or one that does not."""

# Mapped over the leaves of a pass, which is next to nothing of a loop's bytecodes.
_gradient_of = attrgetter("leaf.grad")
_hooks_of = attrgetter("parameter._backward_hooks", "parameter._post_accumulate_grad_hooks")
_NOTHING = repeat(None)


class StandIn(NamedTuple):
    """A leaf in the place of a parameter.

    Args:
        parameter: a trained leaf tensor.
        leaf: with its memory.
        collected: whether :meth:`ParameterLeaves.arrived` returns what I leaves in the leaf.
        elsewhere: returns what stands for a gradient that a backward of user code has added to ``main_grad``, or None;
            None if all arrive in the leaf.
    """

    parameter: Tensor
    leaf: Tensor
    collected: bool
    elsewhere: Callable[[], Tensor | None] | None

    def in_place(self) -> bool:
        """Returns whether the parameter still has the leaf's memory."""
        return self.parameter.data_ptr() == self.leaf.data_ptr()


class ParameterLeaves:
    """Leaves of split forwards, per (stage, microbatch), from the forward until W.

    Args:
        watches_all: whether :attr:`partial` is of all parameters, not only of those with hooks of their own.

    Attributes:
        deferring: key whose I the engine runs; None outside of I and in a backward of user code.
        partial: identities of parameters whose hooks an I has run with a part of a gradient. Besides its split
            operation something else uses such a parameter, and W runs its hooks with the other part.
        passes, thread: see :class:`.user_backwards.Runner`.
    """

    def __init__(self, *, watches_all: bool = False) -> None:
        self._watches_all = watches_all
        self.deferring: Key | None = None
        self._kept: dict[object, Any] = {}  # by linears, in a call
        self.partial: set[int] = set()
        self._leaves: dict[Key, list[StandIn]] = {}
        self._shared: dict[int, StandIn] | None = None
        self._switches: dict[Key, list[Switch]] = {}
        self._without_graph: Collection[int] = ()
        self._refusal = ""
        self.thread: int | None = None
        self.passes = 0
        self._twice = False  # whether a backward has made a graph, whose own backward may reach leaves in I

    def add(
        self,
        key: Key,
        parameter: Tensor,
        leaf: Tensor | None = None,
        *,
        collected: bool = True,
        elsewhere: Callable[[], Tensor | None] | None = None,
    ) -> StandIn:
        """Returns what takes the place of ``parameter`` in the forward of ``key``, a (stage, microbatch).

        The arguments are those of :class:`StandIn`. Without a ``leaf`` it is made, or that of :meth:`sharing` is taken.
        """
        shared = self._shared if leaf is None and self._shared is not None else {}
        stand_in = shared.get(id(parameter))
        if stand_in is None or not stand_in.in_place():
            leaf = parameter.detach().requires_grad_() if leaf is None else leaf
            stand_in = shared[id(parameter)] = StandIn(parameter, leaf, collected, elsewhere)
        self._leaves.setdefault(key, []).append(stand_in)
        return stand_in

    def add_again(self, key: Key, stand_ins: Iterable[StandIn]) -> None:
        """Lets what :meth:`add` returned for one forward take its place in that of ``key`` too."""
        self._leaves.setdefault(key, []).extend(stand_ins)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Surrounds one call of a schedule, in which all its forwards read one leaf of a parameter."""
        self._shared, self._kept = {}, {}
        try:
            with Seeing(self):
                yield
        finally:
            self._shared, self._kept = None, {}

    def keep(self, owner: object, use: Any) -> None:
        """Keeps ``use`` for later forwards of ``owner`` in one call of the schedule; nothing outside of one."""
        if self._shared is not None:
            self._kept[owner] = use

    def kept_by(self, owner: object) -> Any:
        """Returns what ``owner`` has kept, or None."""
        return self._kept.get(owner)

    def switch(self, key: Key, switch: Switch) -> None:
        """Calls ``switch`` with True when the I of ``key`` begins to defer, or now, and with False when it stops."""
        self._switches.setdefault(key, []).append(switch)
        if self.deferring == key:
            switch(True)

    def arrived(self, key: Key) -> list[tuple[Tensor, Tensor]]:
        """Removes and returns the gradients that I left in the leaves of ``key``, as (parameter, gradient).

        These are the gradients of a gradient that user code has computed in the forward (``create_graph``).
        """
        if not self._twice:
            return []
        return [
            (stand_in.parameter, _take(stand_in.leaf))
            for stand_in in self._leaves.get(key, ())
            if stand_in.collected and stand_in.leaf.grad is not None
        ]

    def close(self, key: Key) -> None:
        """Frees the leaves of ``key``.

        Raises:
            RuntimeError: one has a gradient: the operation computed it in I, but did not defer it.
        """
        self._switches.pop(key, None)
        stand_ins = self._leaves.pop(key, ())
        if not any(map(is_not, map(_gradient_of, stand_ins), _NOTHING)):
            return
        for parameter, leaf, collected, _ in stand_ins:
            if collected and leaf.grad is not None:
                raise RuntimeError(
                    f"stage {key[0]}, microbatch {key[1]}: the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} was computed in I and not deferred to W, so it would be lost"
                )

    def forward(self) -> AbstractContextManager[None]:
        """Surrounds a split forward: every backward in it is user code's."""
        return _Pass(self, None)

    def input_gradient(self, key: Key) -> AbstractContextManager[None]:
        """Surrounds the engine's I of ``key``.

        Backwards inside, such as those of recomputed blocks, belong to I unless they have ``inputs`` or
        ``create_graph``.
        """
        return _PassOfI(self, key)

    @contextmanager
    def without_graph(self, parameters: Collection[int], refusal: str) -> Iterator[None]:
        """Surrounds a forward that builds no graph for these ``parameters``, by identity.

        An autograd.grad with respect to one raises RuntimeError with ``refusal``.
        """
        outer, self._without_graph, self._refusal = self._without_graph, parameters, refusal
        try:
            with _Pass(self, None):
                yield
        finally:
            self._without_graph = outer

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Surrounds a W that runs within a forward or an I."""
        outer, self.deferring = self.deferring, None
        try:
            yield
        finally:
            self.deferring = outer

    def _watched_in(self, key: Key) -> dict[int, Tensor]:
        """Returns the parameters of ``key`` whose hooks are watched, by identity."""
        stand_ins = self._leaves.get(key, ())
        with without_modes():
            if not self._watches_all and not any(map(any, map(_hooks_of, stand_ins))):
                return {}
            watched = (each.parameter for each in stand_ins if self._watches_all or any(_hooks_of(each)))
            return {id(parameter): parameter for parameter in watched}

    def _watched(self, name: int, _: Tensor) -> None:
        if self.deferring is not None:
            self.partial.add(name)

    def run_backward(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """See :class:`.user_backwards.Runner`."""
        options = keep_graph, create_graph
        self._twice |= create_graph
        if self.deferring is not None and accumulate_grad and not inputs and not create_graph:
            return engine(outputs, gradients, *options, inputs, allow_unreachable, accumulate_grad=True)
        if any(id(input) in self._without_graph for input in inputs):
            raise RuntimeError(self._refusal)
        leaves = [[stand_in.leaf for stand_in in self._open() if stand_in.parameter is input] for input in inputs]
        asked = (*inputs, *(leaf for of_input in leaves for leaf in of_input))
        allowed = allow_unreachable or len(asked) > len(inputs)
        with _Deferring(self, None), self._filled_from_elsewhere():
            computed = engine(outputs, gradients, *options, asked, allowed, accumulate_grad=accumulate_grad)
            if not accumulate_grad:
                return _joined(inputs, leaves, computed, allow_unreachable)
            self._deliver(create_graph)
        return computed

    @contextmanager
    def _filled_from_elsewhere(self) -> Iterator[None]:
        """Surrounds a backward of user code; leaves that it reaches get what stands for their gradients elsewhere."""
        hooks = []
        for stand_in in self._open():
            if stand_in.elsewhere is not None:
                hooks.append(accumulator_of(stand_in.leaf).register_hook(partial(_fill, stand_in)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _deliver(self, create_graph: bool) -> None:
        """Adds the gradients in leaves to those of their parameters, whose hooks run."""
        filled = [stand_in for stand_in in self._open() if stand_in.leaf.grad is not None]
        arrived = [(stand_in.parameter, _take(stand_in.leaf)) for stand_in in filled]
        if arrived:
            parameters, gradients = zip(*arrived, strict=True)
            engine(parameters, gradients, False, create_graph, (), True, accumulate_grad=True)

    def _open(self) -> Collection[StandIn]:
        """Returns the leaves of all keys, each once."""
        return {id(stand_in): stand_in for leaves in self._leaves.values() for stand_in in leaves}.values()


class _Deferring:
    """Sets :attr:`ParameterLeaves.deferring` for a while, and tells the switches of that key, or of the one before."""

    __slots__ = ("_key", "_leaves", "_outer", "_switches")

    def __init__(self, leaves: ParameterLeaves, key: Key | None) -> None:
        self._leaves, self._key = leaves, key

    def __enter__(self) -> None:
        leaves, key = self._leaves, self._key
        self._outer, leaves.deferring = leaves.deferring, key
        which = key or self._outer
        self._switches = () if which is None else leaves._switches.get(which, ())
        for switch in self._switches:
            switch(key is not None)

    def __exit__(self, *_: object) -> None:
        self._leaves.deferring = self._outer
        for switch in self._switches:
            switch(self._outer is not None)


class _Pass(_Deferring):
    """Lets leaves run every backward of its thread while a pass runs."""

    __slots__ = ("_backwards",)

    def __enter__(self) -> None:
        super().__enter__()
        self._leaves.passes += 1
        self._backwards: Seeing | None = None
        if self._leaves.thread != threading.get_ident():
            self._backwards = Seeing(self._leaves)
            self._backwards.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._backwards is not None:
            self._backwards.__exit__(*error)
        self._leaves.passes -= 1
        super().__exit__(*error)


class _PassOfI(_Pass):
    """Watches hooks while the I of a key runs, which is the last to switch."""

    __slots__ = ("_handles",)

    def __enter__(self) -> None:
        assert self._key is not None
        watched = self._leaves._watched_in(self._key)
        self._handles = [
            parameter.register_hook(partial(self._leaves._watched, name)) for name, parameter in watched.items()
        ]
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            for handle in self._handles:
                handle.remove()
        if self._key is not None:
            self._leaves._switches.pop(self._key, None)


def accumulator_of(leaf: Tensor) -> Any:
    """Returns the node of autograd that adds to the gradient of ``leaf``; graphs that reach it keep it alive."""
    with torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    return view.grad_fn.next_functions[0][0]


def _fill(stand_in: StandIn, *_: Any) -> None:
    """Hook of a leaf's accumulator."""
    if stand_in.leaf.grad is None and stand_in.elsewhere is not None:
        stand_in.leaf.grad = stand_in.elsewhere()


def _take(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return gradient


def _joined(
    inputs: Sequence[Any], leaves: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None], allow_unused: bool
) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each of ``inputs``: the sum of its own and those of its ``leaves``.

    ``gradients`` has those of all inputs, then those of all leaves.

    Raises:
        RuntimeError: one has none, and that is not allowed.
    """
    rest, result = iter(gradients[len(inputs) :]), []
    for input, own, stand_ins in zip(inputs, gradients, leaves, strict=False):
        parts = [part for part in (next(rest) for _ in stand_ins) if part is not None]
        if parts:
            parts = [_hooked(input, reduce(add, parts))]
        parts += [] if own is None else [own]
        if not parts and not allow_unused:
            raise RuntimeError(
                f"the gradient of a tensor of shape {tuple(input.shape)} is asked for, and the graph does not use it; "
                "allow_unused=True gives None"
            )
        result.append(reduce(add, parts) if parts else None)
    return tuple(result)


def _hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Passes a leaf's gradient through the hooks that the parameter has as a tensor."""
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
