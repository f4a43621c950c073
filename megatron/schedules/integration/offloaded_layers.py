"""Offloads activations of Megatron's models: those of the first decoder layers of each chunk.

Hook: ``forward`` of each of these layers' instances. The embedding, what follows the last layer, and the loss stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron.schedules.integration.layers.decoder import decoder_layers
from megatron.schedules.runtime.copies import copies_on
from megatron.schedules.runtime.offload import Offloads

_ADVICE = (
    "give the job more host memory, let it offload less with a larger --pipeline-memory-limit, or "
    "give no offload in --pipeline-save-memory"
)


def offloads_of(model: Sequence[torch.nn.Module], stages: Sequence[int], layers: Sequence[int] | None) -> Offloads:
    """Takes activations of a rank's chunks to the host and back.

    Args:
        model: the chunks.
        stages: which they are.
        layers: by stage, the number of its first decoder layers whose activations are offloaded; None for all.
    """
    offloads = Offloads(copies_on(torch.empty(0, device="cuda").device), _ADVICE)
    for chunk, stage in zip(model, stages, strict=True):
        offload_layers(chunk, offloads, None if layers is None else layers[stage])
    return offloads


def offload_layers(model_chunk: torch.nn.Module, offloads: Offloads, count: int | None = None) -> int:
    """Passes what the first ``count`` decoder layers of a chunk save for their backward through ``offloads``.

    For a microbatch that is not offloaded, and in evaluation, nothing changes. A layer that is recomputed as a whole
    saves only its input, outside its forward; that stays on the device.

    Args:
        model_chunk: wrapped (``Float16Module``, ``DistributedDataParallel``) or not.
        offloads: where they go.
        count: of the chunk's layers; None for all.

    Returns:
        The number of layers.
    """
    layers = decoder_layers(model_chunk)[:count]
    for layer in layers:
        layer.__dict__["forward"] = _through(layer.forward, offloads)
    return len(layers)


def forget_input(model_chunk: torch.nn.Module) -> None:
    """Frees the chunk's input, which stock stores until the next microbatch's."""
    get_attr_wrapped_model(model_chunk, "set_input_tensor")([None])


def _through(forward: Callable[..., Any], offloads: Offloads) -> Callable[..., Any]:
    """``forward`` of one layer, whose saved tensors go through ``offloads``."""

    def saving(*args: Any, **kwargs: Any) -> Any:
        with offloads.saving():
            return forward(*args, **kwargs)

    return saving
