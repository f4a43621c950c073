"""Megatron's linears with a split backward give, bit for bit, the gradients of stock's whole backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import split_helpers as helpers
import torch
from small_gpt import small_gpt
from split_helpers import SEVERAL_I_AHEAD, TOGETHER
from torch import Tensor


def _matrix(sequence_parallel: bool) -> None:
    for bias, order, (dtype, main_grad) in itertools.product(
        (True, False),
        (TOGETHER, SEVERAL_I_AHEAD),
        ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)),
    ):
        block = helpers.block(bias=bias, dtype=dtype, sequence_parallel=sequence_parallel)
        assert helpers.compare(block, order, main_grad=main_grad).split == 3


@pytest.mark.job
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gradients_are_bit_equal_to_stock(tp: int, sequence_parallel: bool):
    helpers.run_ranks(tp, _matrix, sequence_parallel, tensor_model_parallel_size=tp)


def _gpt(sequence_parallel: bool) -> None:
    model, tokens, forward = small_gpt(sequence_parallel)
    # Per layer qkv, proj, fc1, fc2, and the output layer, which stays whole.
    assert helpers.compare(model, SEVERAL_I_AHEAD, forward=forward, inputs=tokens).split == 9


@pytest.mark.nightly
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_whole_gpt_model_is_bit_equal_to_stock(tp: int, sequence_parallel: bool):
    helpers.run_ranks(tp, _gpt, sequence_parallel, tensor_model_parallel_size=tp)


def _expert() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    torch.manual_seed(1)
    common: dict[str, Any] = {
        "config": helpers.config(expert_model_parallel_size=2, num_moe_experts=2),
        "init_method": torch.nn.init.normal_,
        "bias": True,
        "skip_bias_add": True,
        "is_expert": True,
    }
    up = ColumnParallelLinear(8, 16, **common)
    down = RowParallelLinear(16, 8, input_is_parallel=True, **common)
    assert up.explicit_expert_comm
    model = torch.nn.Sequential(up, down)

    def forward(module: Any, x: Tensor) -> Tensor:
        hidden, up_bias = module[0](x.view(-1, 8))
        y, down_bias = module[1]((hidden + up_bias).tanh())
        return y + down_bias

    assert helpers.compare(model, SEVERAL_I_AHEAD, forward=forward).split == 2


@pytest.mark.nightly
def test_expert_linears_split_too():
    helpers.run_ranks(2, _expert, expert_model_parallel_size=2)


def _data_parallel(overlap: bool, distributed_optimizer: bool) -> None:
    from megatron.schedules.integration.linears.local import split_linears

    helpers.data_parallel(helpers.block(dtype=torch.bfloat16), split_linears, overlap, distributed_optimizer)


@pytest.mark.job
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_data_parallel_reduces_once_after_the_last_weight_gradient(overlap: bool, distributed_optimizer: bool):
    helpers.run_ranks(2, _data_parallel, overlap, distributed_optimizer)
