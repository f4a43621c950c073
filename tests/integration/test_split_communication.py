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
from fused_kernels import fused_kernels
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


def _local_fused(sequence_parallel: bool) -> None:
    def twice(module: Any, x: Tensor) -> Tensor:
        return module(x) * module(x.cos())

    for order, (dtype, main_grad), forward in itertools.product(
        (helpers.TOGETHER, SEVERAL_I_AHEAD),
        ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)),
        (None, twice),
    ):
        with fused_kernels():
            block = helpers.block(dtype=dtype, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True)
            assert helpers.compare(block, order, main_grad=main_grad, forward=forward).split == 3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_bit_equal_where_a_product_is_computed_in_i(sequence_parallel: bool):
    helpers.run_ranks(2, _local_fused, sequence_parallel, tensor_model_parallel_size=2)


def _hidden(te: bool, sequence_parallel: bool) -> None:
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    log: list[str] = []
    written = fake_te._written

    def logged(*arguments: Any) -> Tensor:
        log.append("product")
        return written(*arguments)

    with fused_kernels(log), mock.patch.object(fake_te, "_written", logged):
        if te:
            fake_te.install()
            model: Any = Block(
                bias=False, sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=True, **tensor_parallel()
            )
        else:
            model = helpers.block(bias=False, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True)
        meter = ActivationMeter(model.parameters())
        store = WeightGradients(meter)
        (split_te_linears if te else split_linears)(model, store)
        hooks = helpers.MainGrads(model, torch.float32)
        (x,) = helpers.inputs_of(1, torch.float32, sequence_parallel)
        with store.split(0, 0):
            loss = helpers.loss(model(x))
            with recorded(log):
                loss.backward()
        sent = "scatter" if sequence_parallel else "reduce"
        ours = [entry for entry in log if "blocking" not in entry]
        # head has nothing before it to hide behind; up hides behind down.
        assert ours == [sent, f"wait {sent}", sent, "product", f"wait {sent}"]
        assert model.down.weight.main_grad.any() and not hooks.fired["down.weight"], "the hooks fire in W"
        tokens, times = SEQUENCE * BATCH * 4, 2 if sequence_parallel else 1
        # Nothing of down; of head and up the input, and half of the columns of the output's gradient.
        assert meter.current == tokens * ((8 + times * 16) + (8 + times * 8))
        log.clear()
        with recorded(log):
            store.prefetch(0, 0)
            store.run(0, 0)
        # In W the gathers are each ahead of a product: that of head's input, and behind head's product that of up's.
        gathered = ["gather", "gather", "wait gather", "product", "wait gather", "product"]
        assert log == (gathered if sequence_parallel else ["product"] * 2)
        assert set(hooks.fired.values()) == {1} and meter.current == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("te", [False, True])
def test_i_hides_the_reduction_behind_the_weight_gradient_of_the_row_parallel_linear_before(
    te: bool, sequence_parallel: bool
):
    helpers.run_ranks(2, _hidden, te, sequence_parallel, tensor_model_parallel_size=2)


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
