"""Offloads activations of the first decoder layers of each chunk of a Megatron model.

Hook: ``forward`` of each of these layers' instances. Activations of the embedding, of everything after the last layer,
and of the loss stay on the device.
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
    """Prepares the offload of activations of a rank's chunks to host memory.

    Args:
        model: the chunks.
        stages: their stages.
        layers: by stage, the number of first decoder layers whose activations are offloaded; None for all.
    """
    offloads = Offloads(copies_on(torch.empty(0, device="cuda").device), _ADVICE)
    for chunk, stage in zip(model, stages, strict=True):
        offload_layers(chunk, offloads, None if layers is None else layers[stage])
    return offloads


def offload_layers(model_chunk: torch.nn.Module, offloads: Offloads, count: int | None = None) -> int:
    """Passes the tensors that the first ``count`` decoder layers save for their backward through ``offloads``.

    Microbatches that are not offloaded, and evaluation, are unchanged. A fully recomputed layer saves only its input,
    outside its forward; that input stays on the device.

    Args:
        model_chunk: wrapped (``Float16Module``, ``DistributedDataParallel``) or not.
        offloads: stores the activations.
        count: number of the chunk's layers; None for all.

    Returns:
        The number of layers.
    """
    layers = decoder_layers(model_chunk)[:count]
    for layer in layers:
        layer.__dict__["forward"] = _through(layer.forward, offloads)
    return len(layers)


def forget_input(model_chunk: torch.nn.Module) -> None:
    """Frees the chunk's input, which stock otherwise stores until the next microbatch."""
    get_attr_wrapped_model(model_chunk, "set_input_tensor")([None])


def _through(forward: Callable[..., Any], offloads: Offloads) -> Callable[..., Any]:
    """Wraps ``forward`` of one layer so that its saved tensors go through ``offloads``."""

    def saving(*args: Any, **kwargs: Any) -> Any:
        with offloads.saving():
            return forward(*args, **kwargs)

    return saving
