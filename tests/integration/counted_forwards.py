"""How often each decoder layer's forward is run on a rank, without a graph and with one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer


def put_in_place() -> dict[int, list[int]]:
    """Count from now on, in this process: by the layer's number in the model, runs without a graph and with one."""
    runs: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    stock = TransformerLayer.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        runs[layer.layer_number][torch.is_grad_enabled()] += 1
        return stock(layer, *args, **kwargs)

    TransformerLayer.forward = forward
    return runs
