"""Fine-tuning as people do it: the model frozen, a low-rank adapter beside every linear of its layers (LoRA).

The model is changed as its chunks are built, before Megatron wraps them, where a model provider would do it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron.schedules.integration.linears.transformer_engine import linears

RANK = 2


class Adapter(torch.nn.Module):
    """What is added to a linear: one matrix down to few features, one up."""

    def __init__(self, linear: Any, layer: int) -> None:
        super().__init__()
        wide_out, wide_in = linear.weight.shape
        start = torch.Generator().manual_seed(layer)
        self.down = torch.nn.Parameter(torch.randn(RANK, wide_in, generator=start) / wide_in**0.5)
        self.up = torch.nn.Parameter(torch.randn(wide_out, RANK, generator=start) / 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given @ self.down.t().to(given.dtype) @ self.up.t().to(given.dtype)


class OfLinears(torch.nn.Module):
    """The same of Megatron's own linears, as Megatron-Bridge has them, whose backwards are split."""

    def __init__(self, linear: Any, layer: int) -> None:
        super().__init__()
        wide_out, wide_in = linear.weight.shape
        of = {"config": linear.config, "init_method": linear.config.init_method, "bias": False}
        self.down, self.up = ColumnParallelLinear(wide_in, RANK, **of), ColumnParallelLinear(RANK, wide_out, **of)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        lower, _ = self.down(given)
        result: torch.Tensor = self.up(lower)[0]
        return result


def put_in_place(adapter: type[Adapter | OfLinears] = Adapter) -> None:
    """Every model built from now on, in this process, trains adapters only."""
    for kind in (GPTModel, HybridModel):
        _freeze(kind, adapter)


def _freeze(kind: Any, adapter: type[Adapter | OfLinears]) -> None:
    build = kind.__init__

    def build_frozen(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        model.requires_grad_(False)
        for layer in model.decoder.layers:
            for linear in list(layer.modules()):
                if isinstance(linear, (ColumnParallelLinear, RowParallelLinear, *linears())):
                    linear.adapter = adapter(linear, layer.layer_number)
                    linear.register_forward_hook(_added)

    kind.__init__ = build_frozen


def _added(linear: Any, given: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return result[0] + linear.adapter(given[0]), result[1]
