"""What a split backward says to the other tensor-parallel ranks, and when: no more than a whole one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import split_helpers as helpers
import torch
from fused_kernels import fused_kernels
from recorded_collectives import recorded
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD
from split_te_helpers import Block, bound, compare, linear, tensor_parallel
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration.server import Megatron


def _te_block() -> Block:
    return Block(sequence_parallel=True, **tensor_parallel())


def _forms() -> list[Any]:
    """How Transformer Engine may say that a backward gathers: as it does, or in a way that nobody knows."""
    from megatron.schedules.integration.linears import transformer_engine

    return [nullcontext(), mock.patch.object(transformer_engine, "_TO_BE_GATHERED", ())]


def _te_forms() -> None:
    for order in (SEVERAL_I_AHEAD, helpers.TOGETHER):
        for form in _forms():
            with form:
                assert compare(_te_block(), order).split == 3


@pytest.mark.job
def test_gradients_are_bit_equal_wherever_transformer_engine_keeps_its_flag(te: Megatron):
    te("in_groups", 2, _te_forms, tensor_model_parallel_size=2)


def _te_gathers() -> None:
    (x,) = helpers.inputs_of(1, torch.float32, True)
    for form, in_i in zip(_forms(), (1, 3), strict=True):
        model, log = _te_block(), list[str]()
        store = bound(model)
        with form:
            with store.split(0, 0):
                loss = helpers.loss(model(x))
            with recorded(log):
                with store.input_gradient(0, 0):
                    loss.backward()
                # The input of head, the output gradient of down, the input of up.
                gathers = log.count("blocking gather") + log.count("gather")
                assert gathers == in_i, log
                store.run(0, 0)
        assert log.count("blocking gather") + log.count("gather") == in_i + 3, log


def test_transformer_engine_gathers_an_input_once_in_its_w(te: Megatron):
    te("in_groups", 2, _te_gathers, tensor_model_parallel_size=2)


def _another_make() -> None:
    from megatron.schedules.integration.linears.transformer_engine import _Call

    put = _Call.put

    def neither_part_nor_whole(self: Any, operands: Any, function: Any) -> None:
        put(self, [operands[0].flatten(0, -2)[:-1], operands[1]], function)

    model = linear("Linear", 8, 8, parallel_mode="column", sequence_parallel=True, **tensor_parallel())
    store = bound(model)
    with store.input_gradient(0, 0), mock.patch.object(_Call, "put", neither_part_nor_whole):
        loss = helpers.loss(model(*helpers.inputs_of(1, torch.float32, True)))
        with pytest.raises(RuntimeError, match=r"put off a weight gradient of 11 rows of input and 24 of the output's"):
            loss.backward()


def test_another_transformer_engine_that_gathers_otherwise_is_an_error(te: Megatron):
    te("in_groups", 2, _another_make, tensor_model_parallel_size=2)


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


@pytest.mark.job
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_bit_equal_where_a_product_is_computed_in_i(sequence_parallel: bool):
    helpers.run_ranks(2, _local_fused, sequence_parallel, tensor_model_parallel_size=2)


def _hidden(te: bool, sequence_parallel: bool) -> None:
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.linears.te_weight_gradient import WeightGradient
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    log: list[str] = []
    computed = WeightGradient._compute

    def logged(*arguments: Any) -> Any:
        log.append("product")
        return computed(*arguments)

    with fused_kernels(log), mock.patch.object(WeightGradient, "_compute", logged):
        if te:
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
        with store.input_gradient(0, 0):
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
@pytest.mark.parametrize("engine", [False, True])
def test_i_hides_the_reduction_behind_the_weight_gradient_of_the_row_parallel_linear_before(
    te: Megatron, engine: bool, sequence_parallel: bool
):
    te("in_groups", 2, _hidden, engine, sequence_parallel, tensor_model_parallel_size=2)


def _held(make: Callable[[], Any]) -> None:
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    model, bind = make(), split_linears if make is _local_block else split_te_linears
    meter = ActivationMeter(model.parameters())
    store = WeightGradients(meter)
    bind(model, store)
    (x,) = helpers.inputs_of(1, torch.float32, True)
    with store.input_gradient(0, 0):
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


@pytest.mark.parametrize("make", [_local_block, _te_block])
def test_under_sequence_parallelism_nothing_gathered_waits_for_its_weight_gradient(
    te: Megatron, make: Callable[[], Any]
):
    te("in_groups", 2, _held, make, tensor_model_parallel_size=2)


def _prefetch_ahead() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    log: list[str] = []
    product = torch.Tensor.matmul
    model, store = helpers.block(sequence_parallel=True), WeightGradients()
    split_linears(model, store)
    (x,) = helpers.inputs_of(1, torch.float32, True)
    with store.input_gradient(0, 0):
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
