"""Split linears whose inputs were on the host between F and I: the gradients of stock's, W right after I and later."""

from __future__ import annotations

from typing import Any

import pytest
import split_helpers as helpers
import split_te_helpers as te_helpers
import torch
from fused_kernels import fused_kernels
from split_helpers import SEVERAL_I_AHEAD, TOGETHER
from torch import Tensor

from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration.server import Megatron
from tests.runtime.late_copies import LateCopies


class OffloadedModel:
    """A forward whose activations have been on the host before it is over; that of ``stock`` is left alone."""

    def __init__(self, stock: Any) -> None:
        self.copies, self._stock = LateCopies(), stock
        self._offloads = Offloads(self.copies)

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        if module is self._stock:
            result: Tensor = module(x)
            return result
        with self._offloads.forward(0, 0), self._offloads.saving():
            result = module(x)
        self._offloads.offload(0, 0)
        self._offloads.load(0, 0)
        self._offloads.arrive(0, 0)
        return result


def both_orders(make: Any, compare: Any = helpers.compare, **settings: Any) -> None:
    for order in (TOGETHER, SEVERAL_I_AHEAD):
        model = make(**settings)
        offloaded_model = OffloadedModel(model)
        compare(model, order, forward=offloaded_model)
        assert offloaded_model.copies.storages("out") == offloaded_model.copies.storages("back") >= 3


def local_linears() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        both_orders(helpers.block, dtype=dtype)


def transformer_engines() -> None:
    both_orders(te_helpers.Block, te_helpers.compare, **te_helpers.tensor_parallel())


def under_sequence_parallelism() -> None:
    both_orders(helpers.block, sequence_parallel=True)
    both_orders(te_helpers.Block, te_helpers.compare, sequence_parallel=True, **te_helpers.tensor_parallel())


def grouped_linears() -> None:
    both_orders(te_helpers.Experts, te_helpers.compare)


def fused_accumulation() -> None:
    with fused_kernels():
        both_orders(helpers.block, dtype=torch.bfloat16, gradient_accumulation_fusion=True)
    both_orders(te_helpers.Block, te_helpers.compare, fuse_wgrad_accumulation=True)


def whole_linears_fire_their_hooks_under_fused_accumulation() -> None:
    """Although what they find of the weight they saved has lost its attributes."""
    from megatron.schedules.integration.linears.local import split_linears

    found = []
    for offloaded in (False, True):
        with fused_kernels():
            model = helpers.block(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
            hooks = helpers.MainGrads(model, torch.float32)
            split_linears(model, WeightGradients(hooked=offloaded))
            offloaded_model = OffloadedModel(None if offloaded else model)
            for x in helpers.inputs_of(2, torch.bfloat16):
                helpers.loss(offloaded_model(model, x)).backward()
        assert set(hooks.fired.values()) == {2}
        assert bool(offloaded_model.copies.moved) == offloaded
        found.append([parameter.main_grad for parameter in model.parameters()])
    helpers.assert_same("main_grad", found[1], found[0])


ALONE = (
    local_linears,
    transformer_engines,
    grouped_linears,
    fused_accumulation,
    whole_linears_fire_their_hooks_under_fused_accumulation,
)
TWO = (local_linears, transformer_engines, under_sequence_parallelism)


def _checked(ranks: int) -> dict[str, str]:
    return helpers.failures_of(ALONE if ranks == 1 else TWO)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_stocks(te: Megatron, ranks: int):
    for failures in te("in_groups", ranks, _checked, ranks, tensor_model_parallel_size=ranks):
        assert not failures, "\n".join(failures.values())
