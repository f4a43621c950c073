"""Work that the model's modules defer to later passes: weight gradients, recomputes, offloaded activations.

Hooks for recompute and offload: ``forward`` of decoder layers' instances, and ``routing`` of their routers. Activations
of the embedding, of everything after the last layer, and of the loss stay on the device, and are not recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import TopKRouter
from torch.overrides import TorchFunctionMode

from megatron.schedules.integration.linears.local import gradients_in_their_passes, split_linears
from megatron.schedules.integration.linears.te_operands import autocast_now
from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.copies import copies_on
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.recompute import Recomputes, recompute_layer
from megatron.schedules.runtime.weight_gradients import WeightGradients

Chunks = Sequence[torch.nn.Module]

# Stock's name of a chunk's layers; multi-token prediction has blocks of its own.
_LAYERS = "decoder.layers"
_ADVICE = (
    "give the job more host memory, let it offload less with a larger --pipeline-memory-limit, or "
    "give no offload in --pipeline-save-memory"
)


class Deferred(NamedTuple):
    """Work that one pass defers to another.

    Args:
        store: weight gradients that wait for W.
        recompute: forwards that wait for R; None in a program without R.
        offloads: activations that are offloaded between O and L; None in a program without O.
    """

    store: WeightGradients
    recompute: Recomputes | None = None
    offloads: Offloads | None = None

    def assert_empty(self) -> None:
        """Raises an error if deferred work remains after all passes."""
        for work in self:
            if work is not None:
                work.assert_empty()


class ModelBinding:
    """Changes the modules of a rank's model when a program first needs it.

    Args:
        planner: has the layers that are recomputed and offloaded.
        watches_all: whether all parameters are watched for gradients in parts, not only those with hooks.

    Attributes:
        offloads: offloaded activations; None before a program with O.
        volatile: :attr:`.WeightGradients.volatile` of all calls.
    """

    def __init__(self, planner: Planner, *, watches_all: bool = False) -> None:
        self._planner, self._watches_all = planner, watches_all
        self._store: WeightGradients | None = None
        self._running: WeightGradients | None = None
        self._bound = False
        self.volatile: set[int] = set()
        self._recompute: Recomputes | None = None
        self.offloads: Offloads | None = None

    def bind(self, chunks: Chunks, program: Program, meter: ActivationMeter | None) -> Deferred:
        """Prepares the modules of this rank's ``chunks`` for the next ``program`` and returns its deferred work.

        ``meter`` counts tensors in this call; None for no counting.
        """
        stages = program.placement.stages_of(program.rank)
        if program.has_offload and self.offloads is None:
            self.offloads, self._store = Offloads(copies_on(torch.empty(0, device="cuda").device), _ADVICE), None
            counts = self._planner.layers_offloaded
            for chunk, stage in zip(chunks, stages, strict=True):
                _offload_layers(chunk, self.offloads, None if counts is None else counts[stage])
        if self.offloads is not None:
            self.offloads.meter = meter
        if program.has_recompute and self._recompute is None:
            self._recompute = Recomputes(capture_state)
            for chunk, stage in zip(chunks, stages, strict=True):
                which = self._planner.recomputed_layers
                recompute_layers(chunk, None if which is None else which[stage], self._recompute)
        return Deferred(
            self.weight_gradients(chunks, meter, stocks=program.backward_is_stocks),
            self._recompute if program.has_recompute else None,
            self.offloads if program.has_offload else None,
        )

    @property
    def partial_gradients(self) -> Collection[int]:
        """Parameters whose hooks have seen parts of gradients: :attr:`.ParameterLeaves.partial`."""
        return () if self._store is None else self._store.leaves.partial

    def weight_gradients(
        self, chunks: Chunks, meter: ActivationMeter | None = None, *, stocks: bool = False
    ) -> WeightGradients:
        """Queue of weight gradients for the linears of ``chunks``.

        All calls share one queue, except calls in which a meter counts. The linears stay unchanged as long as each
        backward is ``stocks`` (:attr:`.Program.backward_is_stocks`) and no hooks surround their forwards.
        """
        store = self._store
        if store is None or meter is not None:
            hooked, watches_all = self.offloads is not None, self._watches_all
            store = WeightGradients(meter, hooked=hooked, watches_all=watches_all, volatile=self.volatile)
        binds = self._bound or store.hooked or not stocks
        if store is not self._store or binds > self._bound:
            self._bound = binds
            _bind_linears(chunks, store if binds else None)
        self._store = store if meter is None else None
        self._running = store
        return store

    def running(self) -> WeightGradients:
        """Returns the queue of the call that runs, or of the last one."""
        assert self._running is not None
        return self._running

    @contextmanager
    def lent(self, chunks: Chunks, store: WeightGradients) -> Iterator[None]:
        """Binds the linears of ``chunks`` to ``store`` for a while."""
        _bind_linears(chunks, store)
        try:
            yield
        finally:
            self._store, self._bound = None, True  # the next call binds them anew


def _bind_linears(chunks: Chunks, store: WeightGradients | None) -> None:
    """Binds the linears to ``store``, if there is one."""
    for chunk in chunks:
        if store is None:
            gradients_in_their_passes(chunk)
        else:
            split_linears(chunk, store)
            split_te_linears(chunk, store)


def _decoder_layers(model_chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns those of ``model_chunk``, wrapped (``Float16Module``, ``DistributedDataParallel``) or not, in order."""
    return [
        layer
        for name, module in model_chunk.named_modules()
        if isinstance(module, torch.nn.ModuleList) and f".{name}".endswith(f".{_LAYERS}")
        for layer in module
    ]


def _offload_layers(model_chunk: torch.nn.Module, offloads: Offloads, count: int | None) -> None:
    """Passes the tensors that the first ``count`` layers (None for all) save for their backward through ``offloads``.

    Microbatches that are not offloaded, and evaluation, are unchanged. A fully recomputed layer saves only its input,
    outside its forward; that input stays on the device.
    """

    def through(forward: Callable[..., Any]) -> Callable[..., Any]:
        def saving(*args: Any, **kwargs: Any) -> Any:
            with offloads.saving():
                return forward(*args, **kwargs)

        return saving

    for layer in _decoder_layers(model_chunk)[:count]:
        layer.__dict__["forward"] = through(layer.forward)


def recompute_layers(model_chunk: torch.nn.Module, which: range | None, recomputes: Recomputes) -> int:
    """Makes layers of ``model_chunk`` queue for their R in ``recomputes``. Call it once for a chunk.

    ``which`` are counted from 0; None for all. Returns how many these are.
    """
    layers = _decoder_layers(model_chunk)
    chosen = layers if which is None else layers[which.start : which.stop]
    for layer in chosen:
        recompute_layer(layer, recomputes)
        for module in layer.modules():
            if isinstance(module, TopKRouter):
                module.routing = _Routing(module.routing, recomputes)
    return len(chosen)


def capture_state() -> Callable[[], AbstractContextManager[None]]:
    """Captures random states, autocast and FP8; returns what restores them for a while.

    Auxiliary losses and token counters need nothing: stock counts them where grad mode is on, so only in R.
    """
    states = random._get_all_rng_states()
    return partial(
        _restored, states, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), autocast_now()
    )


@contextmanager
def _restored(
    states: tuple[Any, ...], autocast: bool, dtype: torch.dtype, quantizing: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with random._fork_rng(), torch.autocast("cuda", dtype=dtype, enabled=autocast), quantizing():
        random._set_all_rng_states(*states)
        yield


class _Routing:
    """Replaces one router's ``routing``, which orders a token's experts differently where grad mode is off.

    F would then sum the weights of three or more experts in another order than R does, and than without R.
    """

    def __init__(self, routing: Callable[..., Any], recomputes: Recomputes) -> None:
        self._routing, self._recomputes = routing, recomputes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not self._recomputes.active:
            return self._routing(*args, **kwargs)
        with _Sorted():
            return self._routing(*args, **kwargs)


class _Sorted(TorchFunctionMode):
    """Makes ``torch.topk`` return its results in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"sorted": True} if func is torch.topk else kwargs))
