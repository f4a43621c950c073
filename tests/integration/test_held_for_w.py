"""How much a dense layer holds from I to W on eight tensor-parallel ranks, in activations' widths a token."""

from __future__ import annotations

from typing import Any

import pytest
import split_helpers as helpers
import torch
from fused_kernels import fused_kernels
from split_te_helpers import linear
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration.server import Megatron

RANKS, HIDDEN, TOKENS = 8, 64, 32


class _Layer(torch.nn.Module):
    """A layer's four linears, with nothing between them that holds anything for W."""

    def __init__(self, qkv: Any, proj: Any, fc1: Any, fc2: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.fc1, self.fc2 = qkv, proj, fc1, fc2

    def forward(self, x: Tensor) -> Tensor:
        def only(result: Any) -> Tensor:
            return result[0] if isinstance(result, tuple) else result

        q, k, v = only(self.qkv(x)).chunk(3, dim=-1)
        x = x + only(self.proj(q * k + v))
        return x + only(self.fc2(only(self.fc1(x)).sigmoid()))


def _local(sequence_parallel: bool, fused: bool) -> _Layer:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    settings: dict[str, Any] = {
        "config": helpers.config(
            hidden_size=HIDDEN,
            num_attention_heads=RANKS,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=fused,
        ),
        "init_method": torch.nn.init.normal_,
        "bias": False,
        "skip_bias_add": False,
    }
    column = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, **settings)
    up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **settings)
    row = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **settings)
    down = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **settings)
    return _Layer(column, row, up, down)


def _te(sequence_parallel: bool, fused: bool) -> _Layer:
    from megatron.core import parallel_state

    settings: dict[str, Any] = {
        "bias": False,
        "sequence_parallel": sequence_parallel,
        "fuse_wgrad_accumulation": fused,
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "tp_size": RANKS,
    }
    return _Layer(
        linear("LayerNormLinear", HIDDEN, 3 * HIDDEN, parallel_mode="column", **settings),
        linear("Linear", HIDDEN, HIDDEN, parallel_mode="row", **settings),
        linear("LayerNormLinear", HIDDEN, 4 * HIDDEN, parallel_mode="column", **settings),
        linear("Linear", 4 * HIDDEN, HIDDEN, parallel_mode="row", **settings),
    )


def _held() -> dict[tuple[str, bool, bool], float]:
    """In widths of the hidden state a token, on one rank of eight whose peers are imagined."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    parallel_state.initialize_model_parallel(RANKS, create_gloo_process_groups=False)
    found = {}
    for make, bind in ((_local, split_linears), (_te, split_te_linears)):
        for sequence_parallel in (True, False):
            for fused in (True, False):
                with fused_kernels():
                    layer = make(sequence_parallel, fused)
                    hooks = helpers.MainGrads(layer, torch.float32)
                    meter = ActivationMeter(layer.parameters())
                    store = WeightGradients(meter)
                    assert bind(layer, store) == 4
                    x = torch.randn(TOKENS // RANKS if sequence_parallel else TOKENS, 1, HIDDEN, requires_grad=True)
                    with store.input_gradient(0, 0):
                        output = layer(x)
                        output.backward(torch.randn_like(output))
                    found[make.__name__, sequence_parallel, fused] = meter.current / (4 * TOKENS * HIDDEN)
                    store.run(0, 0)
                    assert set(hooks.fired.values()) == {1} and meter.current == 0
    return found


@pytest.fixture(scope="module")
def held(te: Megatron) -> dict[tuple[str, bool, bool], float]:
    found: dict[tuple[str, bool, bool], float] = te("in_groups", 1, _held)[0]
    return found


@pytest.mark.parametrize("linears", ["_local", "_te"])
def test_under_sequence_parallelism(linears: str, held: dict[tuple[str, bool, bool], float]):
    qkv, proj, fc1, fc2 = (1 + 3) / RANKS, (1 + 1) / RANKS, (1 + 4) / RANKS, (4 + 1) / RANKS
    assert held[linears, True, False] == qkv + proj + fc1 + fc2 == 2
    assert held[linears, True, True] == qkv + fc1 == 1.125, "proj and fc2 are done in I"


@pytest.mark.parametrize("linears", ["_local", "_te"])
def test_without_sequence_parallelism(linears: str, held: dict[tuple[str, bool, bool], float]):
    """Inputs of column-parallel linears and output gradients of row-parallel ones are whole on every rank."""
    qkv, fc1 = 1 + 3 / RANKS, 1 + 4 / RANKS
    assert held[linears, False, True] == qkv + fc1
    assert held[linears, False, False] == qkv + fc1 + (1 / RANKS + 1) + (4 / RANKS + 1)
