"""A GPT model of two layers and a few words, of Megatron's local linears on CPUs."""

from __future__ import annotations

from typing import Any

import split_helpers as helpers
import torch
from split_helpers import BATCH, SEQUENCE
from torch import Tensor


def small_gpt(sequence_parallel: bool, words: int = 32, **settings: Any) -> tuple[Any, Any, Any]:
    """The model, what makes its inputs, and its forward to the loss of each token."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    torch.manual_seed(1)
    # torch's norm is all that stock finds here, and it refuses sequence parallelism for the sake of the
    # norms' own gradients (summed over ranks at the end of the iteration), which is no matter for this test.
    WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(hidden_size, eps)
    config = helpers.config(
        num_layers=2, sequence_parallel=sequence_parallel, attention_dropout=0.0, hidden_dropout=0.0
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=words,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        **{"share_embeddings_and_output_weights": False} | settings,
    )
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    def tokens(microbatches: int, *_: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randint(words, (BATCH, SEQUENCE), generator=generator) for _ in range(microbatches)]

    def forward(module: Any, x: Tensor) -> Tensor:
        return module(x, positions, mask, labels=x.roll(-1, 1))

    return model, tokens, forward
