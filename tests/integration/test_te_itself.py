"""Transformer Engine itself, where there is a GPU: split gradients are those of its whole backward, bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import split_helpers as helpers
import torch
from split_helpers import SEVERAL_I_AHEAD
from split_te_helpers import LAST_W_FIRST
from torch import Tensor

from megatron.schedules.runtime.weight_gradients import WeightGradients


class _Real(torch.nn.Module):
    """Transformer Engine's own: a normed linear, a linear, and two experts; (s, b, 64) -> (s * b, 64)."""

    def __init__(self, te: Any, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        settings = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused, "device": "cuda"}
        self.up = te.LayerNormLinear(64, 128, **settings)
        self.down = te.Linear(128, 64, **settings)
        self.experts = te.GroupedLinear(2, 64, 64, **settings)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.nn.functional.gelu(self.up(x))).reshape(-1, 64)
        return self.experts(hidden, [16, hidden.size(0) - 16])


@pytest.mark.parametrize("order", [SEVERAL_I_AHEAD, LAST_W_FIRST])
@pytest.mark.parametrize("fused", [False, True])
def test_transformer_engine_itself(fused: bool, order: str):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    from megatron.schedules.integration.linears.te_found import te_fault
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    assert te_fault() is None
    count = order.count("F")
    generator = torch.Generator("cuda").manual_seed(5)
    drawn = torch.randn(count, 8, 4, 64, device="cuda", dtype=torch.bfloat16, generator=generator)

    def inputs() -> list[Tensor]:
        return [x.clone().requires_grad_() for x in drawn]

    whole = _Real(te, fused)
    ours, store = copy.deepcopy(whole), WeightGradients()
    assert split_te_linears(ours, store) == 3
    hooks, our_hooks = (helpers.MainGrads(model, torch.float32) for model in (whole, ours))
    xs, our_xs = inputs(), inputs()
    outputs = helpers.stock(whole, xs)
    helpers.assert_same("output", helpers.split(partial(ours), our_xs, store, order), outputs)
    helpers.assert_same("input gradient", [x.grad for x in our_xs], [x.grad for x in xs])
    parameters, our_parameters = dict(whole.named_parameters()), dict(ours.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.main_grad.abs().sum() > 0
        helpers.assert_same(name, [our_parameters[name].main_grad], [parameter.main_grad])
    assert our_hooks.fired == hooks.fired == dict.fromkeys(parameters, count)
