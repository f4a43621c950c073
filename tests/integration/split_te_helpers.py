"""Models of Transformer Engine's stand-in, and how they are split."""

from __future__ import annotations

from typing import Any

import fake_te
import split_helpers as helpers
import torch
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients

EXPERTS = 3


class Block(torch.nn.Module):
    """Norm with a column parallel linear, a row parallel one, a head: (s, b, 8) -> (s, b, 16 / tp)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sequence_parallel = settings.get("sequence_parallel", False)
        normed, plain = (fake_te.megatrons(linear) for linear in (fake_te.LayerNormLinear, fake_te.Linear))
        self.up = normed(8, 32, parallel_mode="column", **settings)
        self.down = plain(32, 8, parallel_mode="row", **settings)
        self.head = plain(8, 16, parallel_mode="column", **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(x))))


class Experts(torch.nn.Module):
    """Two grouped linears, so many tokens to the second expert and five to the first: (s, b, 8) -> (s * b, 8)."""

    def __init__(self, second: int = 2, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.splits = [5, second, SEQUENCE * BATCH - 5 - second]
        grouped = fake_te.megatrons(fake_te.GroupedLinear)
        self.up, self.down = grouped(EXPERTS, 8, 16, **settings), grouped(EXPERTS, 16, 8, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.reshape(-1, 8), self.splits).tanh(), self.splits)


def compare(model: Any, order: str = SEVERAL_I_AHEAD, **settings: Any) -> Any:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    return helpers.compare(model, order, bind=split_te_linears, **settings)


def bound(model: Any, meter: ActivationMeter | None = None) -> WeightGradients:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    store = WeightGradients(meter)
    split_te_linears(model, store)
    return store


def tensor_parallel() -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return {} if group.size() == 1 else {"tp_group": group}
