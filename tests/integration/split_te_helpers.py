"""Models of Transformer Engine's linears, and how they are split: in ranks of the server that has its Python."""

from __future__ import annotations

import importlib
from typing import Any

import split_helpers as helpers
import torch
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients

EXPERTS = 3


def linear(name: str, *args: Any, **settings: Any) -> Any:
    """One of Transformer Engine's linears as Megatron has it: it keeps whether a microbatch is an iteration's first."""

    class Megatrons(getattr(importlib.import_module("transformer_engine.pytorch"), name)):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **({"device": "cpu", "params_dtype": torch.float32} | settings))
            self.is_first_microbatch = True
            with torch.no_grad():
                for key, parameter in self.named_parameters():
                    if not key.startswith("layer_norm"):
                        parameter.normal_(std=0.5)

        def forward(self, *args: Any) -> Any:
            output = super().forward(*args, is_first_microbatch=self.is_first_microbatch)
            self.is_first_microbatch = False
            return output

    return Megatrons(*args, **settings)


class Block(torch.nn.Module):
    """Norm with a column parallel linear, a row parallel one, a head: (s, b, 8) -> (s, b, 16 / tp)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sequence_parallel = settings.get("sequence_parallel", False)
        self.up = linear("LayerNormLinear", 8, 32, parallel_mode="column", **settings)
        self.down = linear("Linear", 32, 8, parallel_mode="row", **settings)
        self.head = linear("Linear", 8, 16, parallel_mode="column", **settings)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.down(torch.nn.functional.gelu(self.up(x))))
        return output


class Experts(torch.nn.Module):
    """Two grouped linears, so many tokens to the second expert and five to the first: (s, b, 8) -> (s * b, 8)."""

    def __init__(self, second: int = 2, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.splits = [5, second, SEQUENCE * BATCH - 5 - second]
        self.up = linear("GroupedLinear", EXPERTS, 8, 16, **settings)
        self.down = linear("GroupedLinear", EXPERTS, 16, 8, **settings)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x.reshape(-1, 8), self.splits).tanh(), self.splits)
        return output


def compare(model: Any, order: str = SEVERAL_I_AHEAD, **settings: Any) -> Any:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    # From the second call on no backward need be heard, and later forwards have what the first one had.
    return helpers.compare(model, order, **{"bind": split_te_linears, "calls": 2} | settings)


def bound(model: Any, meter: ActivationMeter | None = None) -> WeightGradients:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    store = WeightGradients(meter)
    split_te_linears(model, store)
    return store


def tensor_parallel() -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return {} if group.size() == 1 else {"tp_group": group, "tp_size": group.size()}
