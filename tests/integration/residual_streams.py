"""A GPT of several residual streams, as hyper-connections make them: what goes from stage to stage is that much wider.

No release of Megatron has them so far. Here a layer reads the mean of the streams, and what it adds goes to each in
another share.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

STREAMS = 3


def put_in_place() -> None:
    """Every GPT model built from now on, in this process, has that many."""
    settings: Any = TransformerConfig
    settings.enable_hyper_connections, settings.num_residual_streams = True, STREAMS
    build, run, run_layer = TransformerBlock.__init__, TransformerBlock.forward, TransformerLayer.forward

    def build_block(block: Any, *args: Any, **kwargs: Any) -> None:
        build(block, *args, **kwargs)
        if block.final_layernorm is not None:
            block.final_layernorm.register_forward_pre_hook(lambda norm, given: (_streams(given[0]).mean(2),))

    def run_block(block: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return run(block, hidden_states.repeat(1, 1, STREAMS) if block.pre_process else None, *args, **kwargs)

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        streams = _streams(hidden_states)
        mean = streams.mean(2)
        output, context = run_layer(layer, mean, *args, **kwargs)
        shares = torch.arange(1.0, STREAMS + 1).to(output)[:, None] / 2
        return (streams + shares * (output - mean)[:, :, None]).flatten(2), context

    TransformerBlock.__init__, TransformerBlock.forward, TransformerLayer.forward = build_block, run_block, forward


def _streams(hidden: Tensor) -> Tensor:
    return hidden.unflatten(2, (STREAMS, -1))
