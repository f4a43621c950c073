"""Replays the graphs of one layer for one microbatch in a training call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.linears.fused_accumulation import fused_gradient
from megatron.schedules.runtime.deferred_gradient import Replayed
from megatron.schedules.runtime.weight_gradients import Key, WeightGradients

FUSED = "added to main_grad"
"""In place of a weight gradient that a graph adds to ``main_grad``."""


class Replay:
    """Graphed callable of one layer and microbatch. Its I leaves the replay of W to the queue of the running call.

    Its outputs and the gradient of its input lie in memory that the next graphs overwrite. The gradient is copied,
    because other ranks and the W of a linear outside of graphs read it later. Such a linear copies an output for its W.

    Args:
        graph: Transformer Engine's graphed callable.
        stores: returns the queue of the running call; None in an evaluation.
        volatile: :attr:`.WeightGradients.volatile` of these queues; gets the memory of the outputs.
        gradients: parameters with the memory of their gradients, or with :data:`FUSED`; None if W has no graph.
        size: size of the graph of W.
        mask: the static attention mask, if it serves all layers and microbatches because none reads it.
        is_first: whether it is the stage's first microbatch, whose forward quantizes the weights.
    """

    def __init__(
        self,
        graph: Any,
        stores: Callable[[], WeightGradients | None],
        volatile: set[int],
        gradients: Sequence[tuple[Tensor, Any]] | None,
        *,
        is_first: bool,
        mask: Tensor | None = None,
        size: Replayed | None = None,
    ) -> None:
        self._graph, self._stores, self._volatile = graph, stores, volatile
        self._gradients, self._size, self._is_first, self._mask = gradients, size, is_first, mask
        self._parameters = [parameter for parameter, _ in gradients or ()]

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replays the forward."""
        if "is_first_microbatch" in kwargs:  # stock takes microbatch 0 for the first
            kwargs["is_first_microbatch"] = self._is_first
        if self._mask is not None and "attention_mask" in kwargs:
            kwargs["attention_mask"] = self._mask  # so that Transformer Engine copies none
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # otherwise there may be no backward, and no weight gradients
        outputs = self._graph(_Leaving.apply(hidden), *args, **kwargs)
        store = self._stores()
        if store is None:  # an evaluation in training mode runs forwards in another order than captured
            return type(outputs)(each.clone() if isinstance(each, Tensor) else each for each in outputs)
        self._volatile.update(memory_of(outputs))
        if self._gradients is not None:
            assert store.current is not None, "the program is that of the capture"
            node: Any = next(each.grad_fn for each in outputs if isinstance(each, Tensor) and each.requires_grad)
            node.register_hook(partial(self._defer, store, store.current))
        return outputs

    def reset(self) -> None:
        """Frees the graphs."""
        self._graph.reset()

    def _defer(self, store: WeightGradients, key: Key, *_: Any) -> None:
        if not store.defers(key):
            raise RuntimeError("a backward that a forward step runs itself cannot go through CUDA graphs")
        store.defer(key, self._weight_gradients, parameters=self._parameters, replayed=self._size or Replayed())

    def _weight_gradients(self) -> list[Tensor | None]:
        self._graph.backward_dw()
        assert self._gradients is not None
        return [fused_gradient(p, p.dtype) if each is FUSED else each for p, each in self._gradients]


def memory_of(values: Iterable[Any]) -> Iterator[int]:
    """Yields where the memory of each tensor in ``values`` begins."""
    return (value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor))


class _Leaving(torch.autograd.Function):
    """The input of a graph; copies its gradient, which may still be on its way when the slot is used again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()
