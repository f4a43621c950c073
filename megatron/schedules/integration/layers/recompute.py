"""Which of Megatron's layers a stage's R does again, and what they depend on beside their inputs."""

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
from megatron.schedules.runtime.recompute import Again, do_again


def recompute_layers(model_chunk: torch.nn.Module, which: range | None, again: Again) -> int:
    """Have decoder layers of ``model_chunk`` wait for their R in ``again``.

    Embedding, final norm, output layer, loss and the layers of multi-token prediction stay as they are. To be called
    once for a chunk.

    Args:
        model_chunk: wrapped or not.
        which: of its layers, counted from 0; None for all.
        again: where they wait.

    Returns:
        The number of these layers.
    """
    layers = decoder_layers(model_chunk)
    chosen = layers if which is None else layers[which.start : which.stop]
    for layer in chosen:
        do_again(layer, again)
        for module in layer.modules():
            if isinstance(module, TopKRouter):
                module.routing = _Routing(module.routing, again)
    return len(chosen)


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """Note random states, autocast and FP8 as they are now; what is returned brings them back for a while.

    Auxiliary losses and counters of tokens need none of it: stock counts them where grad mode is on, so in R alone.
    """
    states = random._get_all_rng_states()
    return partial(
        _as_then, states, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), autocast_now()
    )


@contextmanager
def _as_then(
    states: tuple[Any, ...], autocast: bool, dtype: torch.dtype, quantizing: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with random._fork_rng(), torch.autocast("cuda", dtype=dtype, enabled=autocast), quantizing():
        random._set_all_rng_states(*states)
        yield


class _Routing:
    """Stands for one router's ``routing``, which takes a token's experts in another order where grad mode is off.

    Weights of three or more experts would so be summed up in another order in F than in R, and than without R.
    """

    def __init__(self, routing: Callable[..., Any], again: Again) -> None:
        self._routing, self._again = routing, again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not self._again.keeps:
            return self._routing(*args, **kwargs)
        with _Sorted():
            return self._routing(*args, **kwargs)


class _Sorted(TorchFunctionMode):
    """The largest are always found in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"sorted": True} if func is torch.topk else kwargs))
