"""Low-rank adapters: what is left of a model's estimates where nothing else is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Adapters, Build
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.symbols import with_adapters
from megatron.schedules.estimate.times import loads
from megatron.schedules.integration.flags.configuration import adapters_of

NUMBERS = Numbers(2, 4, 12)
LINEARS = frozenset(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


def llama(targets: frozenset[str] = LINEARS, rank: int = 16) -> tuple[Build, Build]:
    """Llama-3-8B as it is trained, and with adapters instead."""
    build = MODELS["Llama-3-8B"].whole
    return build, replace(build, adapters=Adapters(rank, targets))


def test_weights_are_frozen_and_have_neither_gradients_nor_an_optimizer() -> None:
    """Hugging Face's PEFT counts 41,943,040 weights of rank 16 for all linears, fc1 and qkv each in parts."""
    trained, frozen = (parameters(build).by_stage((32,), (0,), False)[0] for build in llama())
    in_parts = 16 * 32 * (2 * 4096 + 4096)  # PEFT has an input product for each of q, k, v, and for both of fc1
    assert frozen.trained == 41_943_040 - in_parts
    assert frozen.frozen == trained.all
    assert NUMBERS.held(frozen) == 2 * trained.all + (2 + 4 + 12) * frozen.trained


def test_w_computes_next_to_nothing() -> None:
    trained, frozen = (loads(build).mean for build in llama())
    assert frozen.weight_grad == pytest.approx(frozen.forward - trained.forward)
    assert 0 < frozen.weight_grad < 0.02 * trained.weight_grad
    assert frozen.input_grad == pytest.approx(trained.input_grad + frozen.weight_grad)


@pytest.mark.parametrize(("name", "width"), [("linear_qkv", 4096), ("linear_fc1", 4096), ("linear_fc2", 14336)])
def test_a_linear_keeps_its_input_for_its_adapter_alone(name: str, width: int) -> None:
    none, beside = (whole(activations(llama(frozenset(names))[1]).layers[0]) for names in ((), (name,)))
    assert beside.forward - none.forward == pytest.approx(2 * (width + 16))
    assert none.weights == 0 < beside.weights


def test_fused_attention_keeps_its_output_anyway() -> None:
    none, beside = (whole(activations(llama(frozenset(names))[1]).layers[0]) for names in ((), ("linear_proj",)))
    assert beside.forward - none.forward == 2 * 16


def test_adapters_of_none_of_its_linears_leave_a_model_as_it_was() -> None:
    build, _ = llama()
    assert with_adapters(build, Adapters(16, frozenset(("router",)))) == with_adapters(build, None) == build
    assert with_adapters(build, Adapters(16, LINEARS)) == llama()[1]


def chunk(*trained: str) -> torch.nn.Module:
    """A chunk in which parameters with these names are trained."""
    linear = torch.nn.Linear(8, 12)
    linear.adapter = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 12, bias=False))
    model = torch.nn.ModuleDict({"linear_qkv": linear, "linear_fc1": torch.nn.Linear(8, 8)})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(each in name for each in trained))
    return model


def test_a_loop_has_adapters_where_nothing_else_of_its_model_is_trained() -> None:
    assert adapters_of([chunk("adapter")]) == Adapters(2, frozenset(("linear_qkv",)))
    assert adapters_of([chunk("adapter"), chunk()]) == Adapters(2, frozenset(("linear_qkv",)))
    assert adapters_of([chunk("adapter"), chunk("linear_fc1.bias")]) is None
    assert adapters_of([chunk()]) is None
