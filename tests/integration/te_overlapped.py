"""Transformer Engine's linears with Userbuffers by themselves, whole and split: in forked ranks."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from torch import Tensor
from transformer_engine.pytorch.module import base

from megatron.schedules.integration.linears import te_operands
from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration import split_helpers as helpers
from tests.integration.te_fp8 import RECIPES, TOKENS, WIDTH, inputs

PLAIN = "bf16"
_SETTINGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
# Megatron's settings, and those with which the input's gradient is reduced behind its own product.
_MEGATRONS = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")
_REDUCED = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
_REDUCED_BUFFERS = {f"{name}_dgrad": {"method": "ring_exchange", "is_reduce_scatter": True} for name in ("qkv", "fc1")}


class Layer(torch.nn.Module):
    """Two pairs of a column and a row parallel linear, with the names of a layer's buffers: (s / 2, b, 128)."""

    def __init__(self, overlaps: Sequence[str], fused: bool) -> None:
        super().__init__()
        group = parallel_state.get_tensor_model_parallel_group()
        common = {"tp_group": group, "tp_size": group.size(), "sequence_parallel": True, "bias": False}
        common |= {"params_dtype": torch.bfloat16, "device": "cpu", "fuse_wgrad_accumulation": fused}

        def linear(kind: Any, mode: str, name: str, *sizes: int) -> torch.nn.Module:
            known = inspect.signature(kind.__init__).parameters
            overlapped = {each: each in overlaps for each in _SETTINGS if each in known}
            module: torch.nn.Module = kind(*sizes, parallel_mode=mode, ub_name=name, **overlapped, **common)
            return module

        self.first = linear(te.LayerNormLinear, "column", "qkv", WIDTH, 2 * WIDTH)
        self.second = linear(te.Linear, "row", "proj", 2 * WIDTH, WIDTH)
        self.third = linear(te.Linear, "column", "fc1", WIDTH, 2 * WIDTH)
        self.fourth = linear(te.Linear, "row", "fc2", 2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.nn.functional.gelu(self.first(x)))
        output: Tensor = x + self.fourth(torch.nn.functional.gelu(self.third(x)))
        return output


def every_setting(names: Sequence[str]) -> int:
    """Split backwards have the numbers of whole ones, and those have the numbers without Userbuffers; returns how many.

    Args:
        names: of recipes.
    """
    return sum(
        len(_compared(name, overlaps, fused))
        for name, overlaps, fused in itertools.product(names, (_MEGATRONS, _REDUCED), (False, True))
    )


def one_linear_trained(name: str) -> int:
    """The same where only the last linear of each layer is trained: its products are computed late in I."""
    return len(_compared(name, _REDUCED, True, trained="fourth"))


def faults(name: str) -> dict[str, str]:
    """How it ends without what a split backward does about Userbuffers."""
    found = {}
    for fault, what in (("BULK", ()), ("out_of_buffers", lambda operand: operand)):
        overlaps, fused, trained = {
            ("BULK", PLAIN): (_MEGATRONS, True, ""),
            ("out_of_buffers", PLAIN): (_REDUCED, True, "fourth"),
        }.get((fault, name), (_MEGATRONS, False, ""))
        with mock.patch.object(te_operands, fault, what):
            try:
                _compared(name, overlaps, fused, trained)
            except (AssertionError, NotImplementedError) as error:
                found[fault] = str(error)
    return found


def _compared(name: str, overlaps: Sequence[str], fused: bool, trained: str = "") -> list[Tensor | None]:
    """Returns the numbers of a split backward, and compares them."""
    _make_buffers(name, overlaps)
    torch.manual_seed(1)
    plain = torch.nn.Sequential(*(Layer((), fused) for _ in range(2)))
    whole = torch.nn.Sequential(*(Layer(overlaps, fused) for _ in range(2)))
    whole.load_state_dict(plain.state_dict(), strict=False)
    for model in (plain, whole):
        for each, parameter in model.named_parameters():
            parameter.requires_grad_(trained in each)
    split = copy.deepcopy(whole)
    try:
        without, wanted = (_numbers(model, name) for model in (plain, whole))
        helpers.assert_same("number without Userbuffers", wanted, without)
        ours = _numbers(split, name, helpers.SEVERAL_I_AHEAD)
        helpers.assert_same("number", ours, wanted)
    finally:
        base.destroy_ub()
    return ours


def _make_buffers(name: str, overlaps: Sequence[str]) -> None:
    """Makes the buffers as Megatron does."""
    named = {"shape": [TOKENS, WIDTH], "tp_size": 2, "bootstrap_backend": "gloo"}
    named["ub_cfgs"] = _REDUCED_BUFFERS if "ub_overlap_rs_dgrad" in overlaps else {}
    if not hasattr(base, "UserBufferQuantizationMode"):  # before 2.7
        base.initialize_ub(use_fp8=name != PLAIN, **named)
        return
    mode = base.UserBufferQuantizationMode
    base.initialize_ub(quantization_modes=[mode.NONE if name == PLAIN else mode.FP8], **named)


def _numbers(model: Any, name: str, order: str = "") -> list[Tensor | None]:
    """Returns outputs, gradients of inputs, and gradients of weights; of a split backward if there is an order."""

    def forward(x: Tensor) -> Tensor:
        quantizing = {} if name == PLAIN else {"fp8_recipe": RECIPES[name].make()}
        with te.fp8_autocast(enabled=name != PLAIN, **quantizing):
            output: Tensor = model(x)
        return output

    hooks, xs = helpers.MainGrads(model, torch.float32), inputs(3, torch.distributed.get_rank(), 2)
    if order:
        store = WeightGradients()
        assert split_te_linears(model, store) == 8
        outputs = helpers.split(forward, xs, store, order)
    else:
        outputs = helpers.stock(forward, xs)
    assert set(hooks.fired.values()) == {3}
    gradients = [parameter.main_grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(each.any() for each in gradients)
    return [*outputs, *(x.grad for x in xs), *gradients]
