"""The output layer's weight gradient comes with I, so that no gradient of logits waits for a W."""

from __future__ import annotations

from typing import Any

import pytest
import split_helpers as helpers
import torch
from small_gpt import small_gpt
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD, TOGETHER
from split_te_helpers import linear

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration.server import Megatron

WORDS = 4096


def _after_i(model: Any, bind: Any, forward: Any, x: Any) -> None:
    meter = ActivationMeter(model.parameters())
    store = WeightGradients(meter)
    bind(model, store)
    hooks = helpers.MainGrads(model, torch.float32)
    with store.split(0, 0):
        loss = helpers.loss(forward(model, x))
    with store.input_gradient(0, 0):
        loss.backward()
    assert hooks.fired["output_layer.weight"] == 1 and model.output_layer.weight.main_grad.any()
    waiting = [name for name, count in hooks.fired.items() if not count]
    assert store.waiting(0, 0) == len([name for name in waiting if name.endswith("weight")]) > 0
    assert 0 < meter.current < SEQUENCE * BATCH * WORDS
    store.run(0, 0)
    assert set(hooks.fired.values()) == {1}


def _local() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    model, tokens, forward = small_gpt(False, WORDS)
    _after_i(model, split_linears, forward, tokens(1)[0])


class _TeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = linear("Linear", 8, 8, bias=False)
        self.output_layer = linear("Linear", 8, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.up(x).tanh())


def _te() -> None:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    (x,) = helpers.inputs_of(1, torch.float32)
    _after_i(_TeModel(), split_te_linears, lambda model, x: model(x), x)
    assert helpers.compare(_TeModel(), SEVERAL_I_AHEAD, bind=split_te_linears).split == 1


@pytest.mark.parametrize("body", [_local, _te])
def test_nothing_the_size_of_logits_waits_after_i(te: Megatron, body: Any):
    te("in_groups", 1, body)


def _tied() -> None:
    for order in (TOGETHER, SEVERAL_I_AHEAD):
        model, tokens, forward = small_gpt(True, share_embeddings_and_output_weights=True)
        assert model.output_layer.weight is None
        assert helpers.compare(model, order, forward=forward, inputs=tokens).split == 9


@pytest.mark.job
def test_an_output_layer_tied_to_the_embedding_is_bit_equal_to_stock():
    helpers.run_ranks(2, _tied, tensor_model_parallel_size=2)
