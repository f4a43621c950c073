"""Which of Megatron's layers a stage's R does again, and what they depend on beside their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from megatron.core.tensor_parallel import random

from megatron.schedules.runtime.again import Again, do_again

# Stock's word for what holds a chunk's layers; multi-token prediction has blocks of its own.
_LAYERS = "decoder.layers"


def do_layers_again(model_chunk: torch.nn.Module, count: int | None, again: Again) -> int:
    """Have the first ``count`` decoder layers of ``model_chunk``, all of them for None, wait for their R in ``again``.

    Embedding, final norm, output layer, loss and the layers of multi-token prediction stay as they are.

    Returns:
        The number of these layers.
    """
    layers = [
        layer
        for name, module in model_chunk.named_modules()
        if isinstance(module, torch.nn.ModuleList) and f".{name}".endswith(f".{_LAYERS}")
        for layer in module
    ]
    chosen = layers[:count]
    for layer in chosen:
        do_again(layer, again)
    return len(chosen)


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """Note random states and autocast as they are now; what is returned brings them back, and afterwards those before.

    Stock's own recompute leaves out which of its tracker's states is drawn from. Under sequence parallelism that is not
    the default one in layers, and an attention's dropout then goes on from it, not from what the tracker has in store.
    """
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return partial(_as_then, _random_states(), *autocast)


@contextmanager
def _as_then(then: Callable[[], None], enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    now = _random_states()
    then()
    try:
        with torch.autocast("cuda", dtype=dtype, enabled=enabled):
            yield
    finally:
        now()


def _random_states() -> Callable[[], None]:
    """What brings back the random states of now."""
    tracker = random.get_cuda_rng_tracker()
    states, name = random._get_all_rng_states(), tracker._current_state_name

    def bring_back() -> None:
        random._set_all_rng_states(*states)
        tracker._current_state_name = name

    return bring_back
