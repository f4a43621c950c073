"""Offloads activations of Megatron's models: those of the first decoder layers of each chunk.

Hook: ``forward`` of each of these layers' instances. The embedding, what follows the last layer, and the loss stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron.schedules.integration.layers.decoder import decoder_layers
from megatron.schedules.runtime.copies import copies_on
from megatron.schedules.runtime.offload import Offloads

_ADVICE = (
    "give the job more host memory, let it offload less with a larger --pipeline-memory-limit, or "
    "give no offload in --pipeline-save-memory"
)


class CopySpeed(NamedTuple):
    """How O and L are carried out.

    Args:
        gbps: 10**9 bytes a second of each direction, where a CPU stands for the device.
        both_ways: whether there may be copies in both directions at once.
    """

    gbps: float = math.inf
    both_ways: bool = True


def begin(
    model: Sequence[torch.nn.Module], stages: Sequence[int], layers: Sequence[int] | None, speed: CopySpeed
) -> Offloads:
    """Makes the offloads of a rank's chunks.

    Args:
        model: a rank's chunks.
        stages: their numbers.
        layers: by stage, how many of its first decoder layers are offloaded; None for all.
        speed: of the copies.
    """
    device = torch.empty(0, device="cuda").device
    offloads = Offloads(copies_on(device, gbps=speed.gbps, both_ways=speed.both_ways), _ADVICE)
    for chunk, stage in zip(model, stages, strict=True):
        offload_layers(chunk, offloads, None if layers is None else layers[stage])
    return offloads


def offload_layers(model_chunk: torch.nn.Module, offloads: Offloads, count: int | None = None) -> int:
    """Sends what the first ``count`` decoder layers of a chunk save for their backward through ``offloads``.

    For microbatches without O, and in evaluation, nothing changes. A layer that is recomputed as a whole saves only its
    input, outside its forward; that stays on the device. Returns the number of layers; ``count`` None means all.
    """
    layers = decoder_layers(model_chunk)[:count]
    for layer in layers:
        layer.__dict__["forward"] = _Forward(layer.forward, offloads)
    return len(layers)


def forget_input(model_chunk: torch.nn.Module) -> None:
    """Frees the chunk's input, which stock keeps until the next microbatch's."""
    get_attr_wrapped_model(model_chunk, "set_input_tensor")([None])


class _Forward:
    """Replaces one layer's ``forward``."""

    def __init__(self, forward: Any, offloads: Offloads) -> None:
        self._forward, self._offloads = forward, offloads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._offloads.saving():
            return self._forward(*args, **kwargs)
