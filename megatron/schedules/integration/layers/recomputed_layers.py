"""The layers of Megatron that a stage's R recomputes, and the state that they depend on besides their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import TopKRouter
from torch.overrides import TorchFunctionMode

from megatron.schedules.integration.layers.decoder import decoder_layers
from megatron.schedules.integration.linears.quantized import autocast_now
from megatron.schedules.runtime.recompute import Recomputes, recompute_layer


def recompute_layers(model_chunk: torch.nn.Module, which: range | None, recomputes: Recomputes) -> int:
    """Has decoder layers of ``model_chunk`` wait for their R in ``recomputes``; to be called once for a chunk.

    Embedding, final norm, output layer, loss and the layers of multi-token prediction do not change.

    Args:
        model_chunk: wrapped or not.
        which: of its layers, counted from 0; None for all.
        recomputes: where they wait.

    Returns:
        The number of these layers.
    """
    layers = decoder_layers(model_chunk)
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
