"""Captures the forward, I and W of graphed layers in as many slots as microbatches are in flight.

Megatron chooses what is captured, and Transformer Engine captures it. Each layer gets a module of its own in each slot,
so that a forward, and the backward that it leads to, know whose weight gradients they defer. W is captured as
Transformer Engine captures weight gradients that a module delays.

The graphs of a slot share a pool of memory. A slot has one microbatch of one stage at a time, whose passes come in the
order of the captures, so graphs of different slots can be replayed in any order. What W reads is owned by the queue of
weight gradients until W is captured, so no graph captured in between gets its memory. The buffer for the gradient of an
output belongs to no queue, and all layers of a slot share it. An operand of W that lies there is copied in I.

Based on megatron-core 0.19.2, ``transformer/cuda_graphs.py``, and Transformer Engine 2.16 to 2.20.2,
``pytorch/graph.py``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import ENGINE
from megatron.schedules.integration.graphs.order import (
    MASK,
    GraphNumbers,
    Place,
    engine_order,
    graphed_passes,
    layer_passes,
    set_static_inputs,
    share_masks,
)
from megatron.schedules.integration.graphs.replay import FUSED, Replay, memory_of
from megatron.schedules.integration.linears import local, transformer_engine
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.deferred_gradient import Replayed
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.graph_slots import captured_passes, graph_slots
from megatron.schedules.schedule.kinds import Kind

_ENGINE = "transformer_engine.pytorch.graph"
# Arguments of Transformer Engine with a value for each callable.
_FOR_EACH = ("enabled", "fp8_enabled", "capture_time_hooks")
_Key = tuple[int, int]
"""Number of a layer and captured microbatch (:class:`.GraphNumbers`) twice, in place of (stage, microbatch)."""


class CapturedGradients(WeightGradients):
    """Queue of weight gradients while graphs are captured, with a key for each layer and slot."""

    def enter(self, key: _Key | None) -> None:
        """Begins a forward or a backward, until the next begins; None for one that defers nothing."""
        if key is not None:
            self._waiting.setdefault(key, deque())
        self.current = self.leaves.deferring = key

    def end_input_gradient(self, key: _Key) -> None:
        """Ends the I of ``key``."""
        self._settle_newest(self._queue(key))

    def size(self, key: _Key) -> Replayed:
        """Returns what a graph of the W of ``key`` computes."""
        queue = self._queue(key)
        flops = sum(item.flops for item in queue if item.parameters)
        return Replayed(flops, gathers=not all(item.alone for item in queue))

    def take(self, key: _Key) -> Iterator[tuple[Tensor, Tensor | None]]:
        """W: computes all gradients queued for ``key``; yields each parameter with its gradient, and closes the key.

        Gradients are not accumulated, except where a product adds to ``main_grad``.
        """
        queue = self._waiting.pop(key)
        while queue:
            parameters = queue[0].parameters
            with torch.no_grad():
                gradients = self._take_first(queue, None) or ()
            yield from zip(parameters, gradients, strict=True)
        self.leaves.close(key)


class Capture:
    """Captures the graphs of one rank. Used once, with the linears of its model bound to :attr:`store`.

    Args:
        program: the rank's program, which every training call runs from now on.
        stores: returns the queue of weight gradients of the running call; None in an evaluation.
        volatile: gets the memory of graphs' outputs: :attr:`.WeightGradients.volatile` of these queues.
    """

    def __init__(self, program: Program, stores: Callable[[], WeightGradients | None], volatile: set[int]) -> None:
        self.program, self._stores, self._volatile = program, stores, volatile
        self.store = CapturedGradients()

    def make(
        self, stock: Callable[..., Any], callables: Sequence[Any], sample_args: Any, **kwargs: Any
    ) -> tuple[Replay, ...]:
        """Calls Transformer Engine's ``make_graphed_callables``. Arguments are stock's.

        Returns:
            The graphs of each layer and microbatch, in stock's order. Microbatches with one slot share them.
        """
        layers, sample_kwargs = kwargs.pop("_num_layers_per_chunk"), list(kwargs.pop("sample_kwargs"))
        numbers = GraphNumbers(layers, len(sample_args) // len(callables))
        by_chunk = _by_chunk(callables, layers)
        listed = [name for name in _FOR_EACH if isinstance(kwargs.get(name), (tuple, list))]
        for_each = {name: _by_chunk(kwargs[name], layers) for name in listed}
        shares_mask = not any(map(_reads_mask, callables))
        if shares_mask:
            share_masks(sample_kwargs)
        row, placement = graphed_passes(self.program), self.program.placement
        slots, captured = graph_slots(row), dict[Place, _Graphs]()
        for of_slot in captured_passes(row, slots):
            passes = list(layer_passes(of_slot, placement, layers))
            places = list(dict.fromkeys(each.place for each in passes))
            if not places:
                continue  # the stages of the slot have no layer with a graph
            order = engine_order(passes, places, lambda chunk, layer: _defers(by_chunk[chunk][layer]))
            args, named = ([samples[numbers(*place)] for place in places] for samples in (sample_args, sample_kwargs))
            set_static_inputs(order, args, named, shares_mask=shares_mask)
            split = {each.place for each in passes if each.kind is Kind.W}
            modules = tuple(self._module(by_chunk[p.chunk][p.layer], numbers(*p), p in split) for p in places)
            own: dict[str, Any] = {
                name: tuple(values[p.chunk][p.layer] for p in places) for name, values in for_each.items()
            }
            own |= {"_order": order, "_num_layers_per_chunk": [1] * len(modules), "sample_kwargs": named}
            graphs = stock(modules, args, **kwargs | own)
            self.store.assert_empty()
            masks = [each.get(MASK) if shares_mask else None for each in named]
            captured |= dict(zip(places, map(_Graphs, graphs, modules, masks), strict=True))
        first = {work.stage: work.microbatch for work in reversed(row) if work.kind is Kind.F}
        stages = placement.stages_of(self.program.rank)
        return tuple(
            self._replay(
                captured[place._replace(microbatch=slots[stages[place.chunk], place.microbatch].captured)],
                is_first=first[stages[place.chunk]] == place.microbatch,
            )
            for place in numbers
        )

    def _replay(self, graphs: _Graphs, *, is_first: bool) -> Replay:
        weights = graphs.module.weights
        return Replay(
            graphs.callable,
            self._stores,
            self._volatile,
            weights and weights.gradients,
            is_first=is_first,
            mask=graphs.mask,
            size=weights and weights.size,
        )

    def _module(self, layer: Any, number: int, is_split: bool) -> Any:
        hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
        if any(hooks):
            raise RuntimeError("a layer has hooks of its own, which CUDA graphs do not run: register them later")
        defers = is_split and _defers(layer)
        return _Captured(layer, self.store, _weights()(self.store, (number, number)) if defers else None)


def _by_chunk(values: Sequence[Any], layers: Sequence[int]) -> list[list[Any]]:
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in layers]


def _defers(layer: Any) -> bool:
    """Returns whether a linear in the graphs of ``layer`` leaves its weight gradient to W."""
    inside = chain.from_iterable(part.modules() for part in layer._get_submodules_under_cudagraphs())
    return any(local.defers(module) or transformer_engine.defers(module) for module in inside)


def _reads_mask(layer: Any) -> bool:
    """Returns whether attention of ``layer`` may read the mask that it is given; Transformer Engine's need not."""
    attention: Any = getattr(layer, "self_attention", None)
    if not hasattr(attention, "core_attention"):
        return attention is not None and any(True for _ in attention.parameters())
    kernel = sys.modules[ENGINE].DotProductAttention
    builds_its_own = attention.attn_mask_type in (AttnMaskType.causal, AttnMaskType.no_mask)
    return not (builds_its_own and isinstance(attention.core_attention, kernel))


class _Captured(torch.nn.Module):
    """One layer in one slot. ``weights`` is its W; None if I computes the weight gradients."""

    def __init__(self, layer: torch.nn.Module, store: CapturedGradients, weights: Any) -> None:
        super().__init__()
        self.layer, self.weights, self._store = layer, weights, store
        self._key: _Key | None = None if weights is None else weights.key

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns what the layer's graph gives the layer. ``hidden`` has the shape (s, b, h)."""
        store, key = self._store, self._key
        store.enter(key)
        if key is not None:
            self.weights()  # Transformer Engine notes the modules that it sees run
            hidden = _LayerInput.apply(hidden, partial(store.end_input_gradient, key))
        outputs = self.layer(hidden, *args, **kwargs)
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._begin_backward)
        return outputs

    def _begin_backward(self, gradient: Tensor) -> None:
        self._store.enter(self._key)
        self._store.volatile.update(memory_of([gradient]))


class _LayerInput(torch.autograd.Function):
    """The input of a layer. Its backward, the last of the layer's, calls ``then``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return gradient, None


class _Graphs(NamedTuple):
    """The graphs of one layer in one slot: Transformer Engine's callable, what it captured, and the mask of all."""

    callable: Any
    module: _Captured
    mask: Tensor | None


@cache
def _weights() -> Callable[..., Any]:
    """Returns the class of modules that compute W, of a kind for which Transformer Engine captures such a graph."""
    engine = sys.modules[_ENGINE]
    kind: Any = engine.BasicOperation

    class Weights(kind):
        """W of one layer in one slot, with the parameters, their gradients and its size once it is captured."""

        def __init__(self, store: CapturedGradients, key: _Key) -> None:
            super().__init__()
            self.store, self.key = store, key
            self.gradients: list[tuple[Tensor, Any]] = []
            self.size = Replayed()

        def forward(self) -> None:
            """Does nothing."""

        def op_forward(self, *_: Any, **__: Any) -> Any:
            """Is never called."""

        def op_backward(self, *_: Any, **__: Any) -> Any:
            """Is never called."""

        def need_backward_dw(self) -> bool:
            """Returns whether weight gradients wait."""
            return self.store.waiting(*self.key) > 0

        def backward_dw(self) -> None:
            """Computes them. Their memory is free for the next graph: a replay's gradients are used at once."""
            self.gradients.clear()
            self.size = self.store.size(self.key)
            capturing = torch.cuda.is_current_stream_capturing()
            gradients = [(parameter, _result(parameter, g)) for parameter, g in self.store.take(self.key)]
            if capturing:
                weak = engine.make_weak_ref
                self.gradients += [(p, weak(g) if isinstance(g, Tensor) else g) for p, g in gradients]

    return Weights


def _result(parameter: Any, gradient: Tensor | None) -> Any:
    """Returns ``gradient``, or :data:`.FUSED` for one that the product has added to ``main_grad``."""
    return FUSED if getattr(parameter, "grad_added_to_main_grad", False) else gradient
