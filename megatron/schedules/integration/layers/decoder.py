"""The decoder layers of a chunk."""

from __future__ import annotations

import torch

# Stock's name of a chunk's layers; multi-token prediction has blocks of its own.
_LAYERS = "decoder.layers"


def decoder_layers(model_chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns those of ``model_chunk``, wrapped (``Float16Module``, ``DistributedDataParallel``) or not, in order."""
    return [
        layer
        for name, module in model_chunk.named_modules()
        if isinstance(module, torch.nn.ModuleList) and f".{name}".endswith(f".{_LAYERS}")
        for layer in module
    ]
