"""Tied embeddings where both copies are on one rank, as in a V: one tensor's worth of values in two parameters.

Stock keeps the copies of the first and the last rank equal by an all-reduce between the two. In a V they are in two
chunks of the first rank, and what an all-reduce would do is done locally.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor


def copies(model: Sequence[torch.nn.Module]) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """The embedding's and the output layer's weight where they are tied and in two of ``model``'s chunks."""
    if len(model) < 2:
        return None
    first, last = (get_attr_wrapped_model(m, "pre_process", return_model_obj=True) for m in (model[0], model[-1]))
    both_here = first.pre_process and last.post_process
    if not both_here or not getattr(last, "share_embeddings_and_output_weights", False):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def start_equal(model: Sequence[torch.nn.Module]) -> None:
    """Fill the output layer's copy, which stock leaves at zero, from the embedding."""
    found = copies(model)
    if found is not None:
        embedding, output = found
        output.data.copy_(embedding.data)


def sum_gradients(model: Sequence[torch.nn.Module]) -> None:
    """Give both copies the sum of their gradients, after stock has reduced each over the data-parallel ranks.

    Stock puts shared embeddings in buckets of their own, so each rank's shard of the two copies is the same slice.
    """
    found = copies(model)
    if found is not None:
        embedding, output = map(_gradient, found)
        embedding.add_(output)
        output.copy_(embedding)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    assert gradient is not None, "a tied embedding without a gradient"
    return gradient
