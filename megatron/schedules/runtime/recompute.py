"""Layers' forwards that are done again: F keeps their inputs alone, and R makes the graph that I goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from megatron.schedules.runtime.graph_edge import edge_of
from megatron.schedules.runtime.program import ProgramError

Surroundings = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Notes what a forward depends on beside its inputs, such as random states; what it returns brings that back."""


class Again:
    """Forwards that wait for their R, per (stage, microbatch), in the order in which F did them.

    F runs inside :meth:`keeping`: the layers that :func:`do_again` has bound then run without a graph and keep their
    inputs, each its own. R is :meth:`run`. Everywhere else such a layer is as it was.

    Args:
        surroundings: what is brought back for R, beside inputs.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._waiting: dict[tuple[int, int], list[_Run]] = {}
        self._open: tuple[int, int] | None = None

    @contextmanager
    def keeping(self, stage: int, microbatch: int) -> Iterator[None]:
        """Round an F: a :meth:`run` is owed, even where no layer has kept anything."""
        outer, self._open = self._open, (stage, microbatch)
        self._waiting[self._open] = []
        try:
            yield
        finally:
            self._open = outer

    def run(self, stage: int, microbatch: int) -> None:
        """R: do the forwards kept for (stage, microbatch) again, with their graphs.

        To be called within whatever F had round it, but :meth:`keeping`. Random states are afterwards as before.

        Raises:
            ProgramError: its F was not inside :meth:`keeping`, or its R has been.
            RuntimeError: an input was modified in place since F.
        """
        waiting = self._waiting.pop((stage, microbatch), None)
        if waiting is None:
            raise ProgramError(f"{stage}R{microbatch}: its forward has kept nothing to be done again, or was already")
        for each in waiting:
            each.again()

    def assert_empty(self) -> None:
        """Raise RuntimeError if an F that kept inputs has not had its R."""
        if self._waiting:
            left = ", ".join(f"{s}R{m} ({len(runs)} layers)" for (s, m), runs in self._waiting.items())
            raise RuntimeError(f"forwards not done again: {left}")

    @property
    def keeps(self) -> bool:
        """Whether what is called now is to be done again."""
        return self._open is not None

    def kept(self, call: _Call, anchor: Tensor, inputs: Sequence[Tensor]) -> _Run:
        """``call`` with these ``inputs``, from now on waiting for its R."""
        assert self._open is not None
        run = _Run(self._open, call, self._surroundings(), anchor, inputs)
        self._waiting[self._open].append(run)
        return run


def do_again(layer: torch.nn.Module, again: Again) -> None:
    """Have the forwards of ``layer`` wait in ``again`` where that asks for it; to be called once for a layer.

    Its inputs and outputs are tensors and anything else, in lists, tuples and dicts; gradients go to and from tensors
    found there. Hooks of the layer are called in F, those of its submodules in R too.
    """
    layer.forward = _Forward(layer, again)


class _Call(NamedTuple):
    """One call of a layer's forward: arguments as leaves of a tree, without the tensors, and where these stood."""

    forward: Callable[..., Any]
    leaves: list[Any]
    tree: pytree.TreeSpec
    places: list[int]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.forward(*args, **kwargs)


class _Forward:
    """Stands for one layer's ``forward``."""

    def __init__(self, layer: torch.nn.Module, again: Again) -> None:
        self._layer, self._again, self._whole = layer, again, layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._again.keeps:
            return self._whole(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        if not self._is_trained(tensors):
            return self._whole(*args, **kwargs)
        for place in places:
            leaves[place] = None
        # Something has to bring I here even if the inputs need no gradient.
        anchor = torch.empty(0, requires_grad=True)
        run = self._again.kept(_Call(self._whole, leaves, tree, places), anchor, tensors)
        found: tuple[Any, ...] = _Layer.apply(run, anchor, *tensors)
        return run.output(found)

    def _is_trained(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there is a graph to be made: an input or a parameter needs a gradient."""
        return any(each.requires_grad for each in chain(tensors, self._layer.parameters()))


class _Run:
    """One forward of a layer, from F to I."""

    def __init__(
        self,
        key: tuple[int, int],
        call: _Call,
        as_then: Callable[[], AbstractContextManager[None]],
        anchor: Tensor,
        inputs: Sequence[Tensor],
    ) -> None:
        self._key, self._needing = key, [tensor.requires_grad for tensor in inputs]
        self._kept: tuple[_Call, Callable[[], AbstractContextManager[None]], Any] | None
        self._kept = call, as_then, _Kept.apply(anchor, *(tensor.detach() for tensor in inputs))
        self._output: pytree.TreeSpec | None = None
        self._inputs: list[Tensor | None] = []
        self._starts: list[GradientEdge | None] | None = None

    def first(self, inputs: Sequence[Tensor]) -> list[Any]:
        """F, to be called without grad mode: the leaves of what the layer returns, tensors without history."""
        assert self._kept is not None
        call, _, _ = self._kept
        # A layer may turn grad mode on for a part of itself, as Megatron's do where they add a bias and the residual.
        found, self._output = pytree.tree_flatten(call([tensor.detach() for tensor in inputs]))
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found]

    def output(self, leaves: Sequence[Any]) -> Any:
        """What the layer returns, of these leaves."""
        assert self._output is not None
        return pytree.tree_unflatten(list(leaves), self._output)

    def again(self) -> None:
        """R. Of what the layer returns only the places are held where its backward starts."""
        assert self._kept is not None
        call, as_then, saved = self._kept
        self._kept = None
        pairs = zip(saved.grad_fn.saved_tensors, self._needing, strict=True)
        inputs = [tensor.detach().requires_grad_(needing) for tensor, needing in pairs]
        del saved
        with as_then(), torch.enable_grad():
            found = pytree.tree_leaves(call(inputs))
        self._inputs = [tensor if tensor.requires_grad else None for tensor in inputs]
        self._starts = [edge_of(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in found]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """I: the gradients of the inputs from those of what the layer returned, each once."""
        starts, self._starts = self._starts, None
        if starts is None:
            stage, microbatch = self._key
            raise ProgramError(
                f"the backward of stage {stage}, microbatch {microbatch} comes before {stage}R{microbatch}"
            )
        pairs = [
            (start, gradient)
            for start, gradient in zip(starts, gradients, strict=True)
            if start is not None and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([start for start, _ in pairs], [gradient for _, gradient in pairs])
        inputs, self._inputs = self._inputs, []
        return [None if tensor is None else tensor.grad for tensor in inputs]


class _Layer(torch.autograd.Function):
    """A layer whose graph is made later."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(run.first(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run.backward(gradients)


class _Kept(torch.autograd.Function):
    """Nothing, as a function of tensors that it saves: so whatever counts, moves or watches saved tensors sees them.

    A node of its own, for it can be let go of at R, and not only when the layer's backward has run.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is a function of nothing")
