"""What a split backward says to the other tensor-parallel ranks, and when: no more than a whole one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import fake_te
import pytest
import split_helpers as helpers
import torch
from recorded_collectives import recorded
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD
from split_te_helpers import Block, bound, compare, tensor_parallel
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients

FORMS = ({}, {"older": True}, {"debug": True})
"""Of Transformer Engine: how a backward knows that it gathers; in the last it may not be told otherwise."""


def _te_block(form: dict[str, bool]) -> Block:
    fake_te.install()
    block = Block(sequence_parallel=True, **tensor_parallel())
    for linear in (block.up, block.down, block.head):
        vars(linear).update(form)
    return block


def _te_forms() -> None:
    for form, order in itertools.product(FORMS, (SEVERAL_I_AHEAD, helpers.TOGETHER)):
        assert compare(_te_block(form), order).split == 3


def test_gradients_are_bit_equal_wherever_transformer_engine_keeps_its_flag():
    helpers.run_ranks(2, _te_forms, tensor_model_parallel_size=2)


def _te_gathers() -> None:
    (x,) = helpers.inputs_of(1, torch.float32, True)
    for form in FORMS:
        model, log = _te_block(form), list[str]()
        store = bound(model)
        with store.split(0, 0):
            loss = helpers.loss(model(x))
            with recorded(log):
                loss.backward()
                # The input of head, the output gradient of down, the input of up.
                in_i = 3 if form.get("debug") else 1
                assert log.count("blocking gather") == in_i, form
                store.run(0, 0)
        assert log.count("gather") == log.count("wait gather") == 3, form


def test_transformer_engine_gathers_an_input_once_in_its_w():
    helpers.run_ranks(2, _te_gathers, tensor_model_parallel_size=2)


class _AnotherMake(fake_te.Linear):
    """Hands over something that is neither this rank's part nor the whole."""

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        output = super().forward(x, is_first_microbatch)
        call = output.grad_fn.call
        put = call.store.put
        call.store.put = lambda operands, product: put([operands[0][:-1], operands[1]], product)
        return output


def _another_make() -> None:
    fake_te.install()
    model = _AnotherMake(8, 8, parallel_mode="column", sequence_parallel=True, **tensor_parallel())
    store = bound(model)
    with store.split(0, 0):
        loss = helpers.loss(model(*helpers.inputs_of(1, torch.float32, True)))
    with pytest.raises(RuntimeError, match=r"put off a weight gradient of 9 rows of input and 24 of the output's"):
        loss.backward()


def test_another_transformer_engine_that_gathers_otherwise_is_an_error():
    helpers.run_ranks(2, _another_make, tensor_model_parallel_size=2)


def _local_block() -> Any:
    return helpers.block(sequence_parallel=True)


def _held(make: Callable[[], Any], bind: Callable[..., int]) -> None:
    model = make()
    meter = ActivationMeter(model.parameters())
    store = WeightGradients(meter)
    bind(model, store)
    (x,) = helpers.inputs_of(1, torch.float32, True)
    with store.split(0, 0):
        helpers.loss(model(x)).backward()
    tokens = SEQUENCE * BATCH * 4
    # Of this rank's tokens: the input and output's gradient of up, down and head, of which those of all ranks' tokens
    # have half of the columns each.
    assert meter.current == tokens * ((8 + 2 * 16) + (2 * 16 + 8) + (8 + 2 * 8))
    log: list[str] = []
    with recorded(log):
        store.prefetch(0, 0)
        assert log == ["gather"], "ahead of W"
        store.run(0, 0)
    assert log == ["gather", "gather", "wait gather", "gather", "wait gather", "wait gather"]
    assert meter.current == 0


@pytest.mark.parametrize("make", [_local_block, partial(_te_block, {})])
def test_under_sequence_parallelism_nothing_gathered_waits_for_its_weight_gradient(make: Callable[[], Any]):
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    bind = split_linears if make is _local_block else split_te_linears
    helpers.run_ranks(2, _held, make, bind, tensor_model_parallel_size=2)


def _prefetch_ahead() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    log: list[str] = []
    product = torch.Tensor.matmul
    model, store = helpers.block(sequence_parallel=True), WeightGradients()
    split_linears(model, store)
    (x,) = helpers.inputs_of(1, torch.float32, True)
    with store.split(0, 0):
        helpers.loss(model(x)).backward()

    def logged_product(*arguments: Any) -> Tensor:
        log.append("product")
        return product(*arguments)

    with recorded(log), mock.patch.object(torch.Tensor, "matmul", logged_product):
        store.prefetch(0, 0)
        assert log == ["gather"]
        store.run(0, 0)
    # Queued from the top: the input of head, the output's gradient of down, which is row parallel, the input of up.
    launched = [entry for entry in log if entry != "wait gather"]
    assert launched == ["gather", "gather", "product", "gather", "product", "product"]


def test_what_a_w_gathers_is_gathered_ahead_of_its_product():
    helpers.run_ranks(2, _prefetch_ahead, tensor_model_parallel_size=2)
