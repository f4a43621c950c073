"""Recomputed forwards of layers: F keeps only their inputs, and R builds the graph that I goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from megatron.schedules.programs.program import ProgramError
from megatron.schedules.runtime.graph_edge import edge_of

Restore = Callable[[], AbstractContextManager[None]]
CaptureState = Callable[[], Restore]
"""Captures what a forward depends on besides its inputs, such as random states; returns what restores it."""

WITHOUT_RECOMPUTE = "leave it out, or use a plan without recompute: a schedule by name, or a larger memory limit"
"""Advice to user code whose own backward needs a graph that is built in R."""


class Recomputes:
    """Forwards that wait for their R, per (stage, microbatch), in the order in which F ran them.

    F runs inside :meth:`forward`: layers bound by :func:`recompute_layer` then run without a graph, and each keeps its
    inputs. R is :meth:`run`. Everywhere else such a layer is unchanged.

    Args:
        capture_state: captures what R restores besides inputs.

    Attributes:
        parameters: identities of the parameters of all bound layers.
    """

    def __init__(self, capture_state: CaptureState) -> None:
        self.parameters: set[int] = set()
        self._capture_state = capture_state
        self._waiting: dict[tuple[int, int], list[_RecomputedForward]] = {}
        self._open: tuple[int, int] | None = None

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Surrounds an F with an R: a :meth:`run` must follow, even where no layer has kept anything."""
        outer, self._open = self._open, (stage, microbatch)
        self._waiting[self._open] = []
        try:
            yield
        finally:
            self._open = outer

    def run(self, stage: int, microbatch: int) -> None:
        """R: recomputes the forwards of (stage, microbatch), with their graphs.

        Must be called within the same contexts as F, except :meth:`forward`. Leaves random states as they were.

        Raises:
            ProgramError: its F was not inside :meth:`forward`, or its R has run already.
            RuntimeError: an input was modified in place since F.
        """
        waiting = self._waiting.pop((stage, microbatch), None)
        if waiting is None:
            raise ProgramError(
                f"{stage}R{microbatch}: its forward kept nothing to recompute, or was recomputed already"
            )
        for run in waiting:
            run.recompute()

    def assert_empty(self) -> None:
        """Raises RuntimeError if an F that kept inputs has not had its R."""
        if self._waiting:
            left = ", ".join(f"{s}R{m} ({len(runs)} layers)" for (s, m), runs in self._waiting.items())
            raise RuntimeError(f"forwards not recomputed: {left}")

    @property
    def active(self) -> bool:
        """True if a layer that is called now will be recomputed."""
        return self._open is not None

    def add(self, call: _BoundForward, anchor: Tensor, inputs: Sequence[Tensor]) -> _RecomputedForward:
        """Queues ``call(*inputs)`` for its R pass."""
        assert self._open is not None
        run = _RecomputedForward(self, self._open, call, self._capture_state(), anchor, inputs)
        self._waiting[self._open].append(run)
        return run


def recompute_layer(layer: torch.nn.Module, recomputes: Recomputes) -> None:
    """Makes forwards of ``layer`` queue in ``recomputes`` while that is active. Call it once for a layer.

    Its inputs and outputs are tensors and anything else, in lists, tuples and dicts; gradients flow through the tensors
    found there. Hooks of the layer are called in F, those of its submodules in R too.
    """
    layer.forward = _LayerForward(layer, recomputes)
    recomputes.parameters.update(map(id, layer.parameters()))


class _BoundForward(NamedTuple):
    """One call of a layer's forward: its arguments as leaves of a tree, without the tensors, and their positions."""

    forward: Callable[..., Any]
    leaves: list[Any]
    tree: pytree.TreeSpec
    positions: list[int]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.forward(*args, **kwargs)


class _LayerForward:
    """Replaces one layer's ``forward``."""

    def __init__(self, layer: torch.nn.Module, recomputes: Recomputes) -> None:
        self._layer, self._recomputes, self._whole = layer, recomputes, layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recomputes.active:
            return self._whole(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[position] for position in positions]
        if not any(tensor.requires_grad for tensor in chain(tensors, self._layer.parameters())):
            return self._whole(*args, **kwargs)
        for position in positions:
            leaves[position] = None
        # Autograd has to call I here even if the inputs need no gradient.
        anchor = torch.empty(0, requires_grad=True)
        run = self._recomputes.add(_BoundForward(self._whole, leaves, tree, positions), anchor, tensors)
        return run.output(_Layer.apply(run, anchor, *tensors))


class _RecomputedForward:
    """One forward of a layer, from F to I."""

    def __init__(
        self,
        recomputes: Recomputes,
        key: tuple[int, int],
        call: _BoundForward,
        restore: Restore,
        anchor: Tensor,
        inputs: Sequence[Tensor],
    ) -> None:
        self._recomputes = recomputes
        self._key, self._needing = key, [tensor.requires_grad for tensor in inputs]
        saved = _SavedInputs.apply(anchor, *(tensor.detach() for tensor in inputs))
        self._kept: tuple[_BoundForward, Restore, Any] | None = call, restore, saved
        self._output: pytree.TreeSpec | None = None
        self._inputs: list[Tensor | None] = []
        self._starts: list[GradientEdge | None] | None = None

    def first(self, inputs: Sequence[Tensor]) -> list[Any]:
        """F, to be called without grad mode: returns the leaves of the layer's output, tensors without history."""
        assert self._kept is not None
        call, _, _ = self._kept
        # A layer may turn grad mode on for a part of itself, as Megatron's do where they add a bias and the residual.
        leaves, self._output = pytree.tree_flatten(call([tensor.detach() for tensor in inputs]))
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def output(self, leaves: Sequence[Any]) -> Any:
        """Returns the layer's output, made of these leaves."""
        assert self._output is not None
        return pytree.tree_unflatten(list(leaves), self._output)

    def recompute(self) -> None:
        """R: builds the graph. Keeps the start of the backward instead of the layer's output."""
        self._inputs, self._starts = self._graph()
        self._kept = None

    def _graph(self) -> tuple[list[Tensor | None], list[GradientEdge | None]]:
        """Runs the layer again; returns the inputs that need gradients, and where a backward from its output starts."""
        assert self._kept is not None
        call, restore, saved = self._kept
        pairs = zip(saved.grad_fn.saved_tensors, self._needing, strict=True)
        inputs = [tensor.detach().requires_grad_(needing) for tensor, needing in pairs]
        with restore(), torch.enable_grad():
            leaves = pytree.tree_leaves(call(inputs))
            starts = [edge_of(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
        return [tensor if tensor.requires_grad else None for tensor in inputs], starts

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """I: returns the gradients of the inputs from those of the output, each once.

        A backward that user code runs within F recomputes the layer for itself.
        """
        stage, microbatch = self._key
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"stage {stage}, microbatch {microbatch}: a backward with create_graph=True reaches a layer that the "
                f"plan recomputes, which has no gradient of a gradient; {WITHOUT_RECOMPUTE}"
            )
        inputs, starts = self._inputs, self._starts
        if self._kept is not None and self._recomputes.active:
            inputs, starts = self._graph()
        else:
            self._inputs, self._starts = [], None
        if starts is None:
            raise ProgramError(
                f"the backward of stage {stage}, microbatch {microbatch} comes before {stage}R{microbatch}"
            )
        pairs = [
            (start, gradient)
            for start, gradient in zip(starts, gradients, strict=True)
            if start is not None and gradient is not None
        ]
        if not pairs:
            return [None] * len(inputs)
        roots, given = zip(*pairs, strict=True)
        if torch.autograd._is_checkpoint_valid():
            torch.autograd.backward(roots, given)
            return [None if tensor is None else tensor.grad for tensor in inputs]
        # Of an autograd.grad, which leaves the gradients of parameters as they are.
        asked = [tensor for tensor in inputs if tensor is not None]
        answers = iter(torch.autograd.grad(roots, asked, given, allow_unused=True) if asked else ())
        return [None if tensor is None else next(answers) for tensor in inputs]


class _Layer(torch.autograd.Function):
    """A layer whose graph is built later."""

    @staticmethod
    def forward(ctx: Any, run: _RecomputedForward, anchor: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(run.first(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run.backward(gradients)


class _SavedInputs(torch.autograd.Function):
    """Saves tensors for a backward that never runs, so that whatever counts, moves or watches saved tensors sees them.

    It is a node of its own because R frees it, before the layer's backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        raise AssertionError("this node has no backward")
