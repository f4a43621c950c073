"""Embeddings that one rank has twice: the same values in two parameters.

The second copy is the output layer's where they are tied, or that of multi-token prediction, which embeds too. Stock
keeps the copies of the first and the last rank equal by an all-reduce between the two. In a V they are in two chunks of
the first rank, and under vocabulary parallelism each rank has its part twice; the sum is then local.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron.schedules.integration.vocabulary.parts import parts_of


def copies(
    model: Sequence[torch.nn.Module], *, shares_vocabulary: bool = True
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Returns the embedding's weight in the first and in the last chunk of ``model``; None unless both have it.

    Without ``shares_vocabulary`` there are no parts of tables to look for, which takes long in a large model.
    """
    parts = parts_of(model) if shares_vocabulary else None
    if parts is not None:
        return (parts.embedding.weight, parts.output.weight) if parts.output.tied else None
    if len(model) < 2:
        return None
    first, last = (get_attr_wrapped_model(m, "pre_process", return_model_obj=True) for m in (model[0], model[-1]))
    both_here = first.pre_process and last.post_process
    shared = getattr(last, "share_embeddings_and_output_weights", False) or getattr(last, "mtp_process", False)
    if not both_here or not shared:
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def start_equal(model: Sequence[torch.nn.Module]) -> None:
    """Fills the last chunk's copy, which stock leaves at zero, from the first's."""
    pair = copies(model)
    if pair is not None:
        first, last = pair
        last.data.copy_(first.data)


def sum_gradients(model: Sequence[torch.nn.Module], *, shares_vocabulary: bool) -> None:
    """Gives both copies the sum of their gradients, after stock has reduced each over the data-parallel ranks.

    Stock puts shared embeddings in buckets of their own, so each rank's shard of the two copies is the same slice.
    """
    pair = copies(model, shares_vocabulary=shares_vocabulary)
    if pair is not None and pair[0].requires_grad:
        first, last = map(_gradient, pair)
        first.add_(last)
        last.copy_(first)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    assert gradient is not None, "a tied embedding without a gradient"
    return gradient
