"""Output layers are never split: their weight gradient is computed in I.

It needs the gradient of the logits, by far the largest tensor of a model: 2.1 GB for 8192 tokens and a vocabulary of
128 thousand. W would store one for each waiting microbatch. Stock's own backward of the layer hides its communication.
I of the last stage is longer by that product and its W is shorter, as ``tools/profile_passes.py`` measures.
"""

from __future__ import annotations

import torch

# Attribute name in Megatron's language models.
_NAME = "output_layer"


def output_layers(model_chunk: torch.nn.Module) -> set[torch.nn.Module]:
    """Returns the output layers in ``model_chunk`` and all modules inside them."""
    return {module for name, module in model_chunk.named_modules() if _NAME in name.split(".")}
