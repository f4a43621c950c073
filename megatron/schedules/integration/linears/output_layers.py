"""Output layers stay whole: their weight gradient comes with I.

What it needs is the gradient of the logits, by far the largest tensor of a model: of 8192 tokens and 128 thousand words
2.1 GB. A W would hold one for each microbatch that waits, so none does. That is the layer's own backward, which hides
its communication as a whole one does; where the weight is tied to an embedding of the same chunk, or multi-token
prediction uses the layer again, autograd adds the gradients up as it does without a split. I of the last stage takes
longer by that product and its W is shorter, as ``tools/profile_passes.py`` measures them.
"""

from __future__ import annotations

import torch

# What Megatron's language models call it.
_NAME = "output_layer"


def output_layers(model_chunk: torch.nn.Module) -> set[torch.nn.Module]:
    """The output layers in ``model_chunk``, and all that is in them."""
    return {module for name, module in model_chunk.named_modules() if _NAME in name.split(".")}
