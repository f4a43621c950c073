"""Each kind of Transformer Engine's linears by itself, whole and split, to be compared to the bit."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration import split_helpers as helpers

# Sums of two are the same in both orders, so that gradients must be the same bits though the W change places.
LAST_W_FIRST = "F0 F1 I0 I1 W1 W0"
WIDTH, SEQUENCE, BATCH = 64, 8, 4
_TOKENS = SEQUENCE * BATCH


class Case(NamedTuple):
    """What is compared.

    Args:
        kind: of module, see :data:`KINDS`.
        bias: whether it has any.
        fused: whether its products add to ``main_grad``.
        order: of the passes.
        device: where.
    """

    kind: str
    bias: bool
    fused: bool
    order: str
    device: str

    def __str__(self) -> str:
        bias = "with bias" if self.bias else "without bias"
        return f"{self.kind}, {bias}, {'fused' if self.fused else 'not fused'}, {self.order}"


class _Experts(torch.nn.Module):
    """Two experts, of which the second gets fewer tokens: (s, b, 64) -> (s * b, 64)."""

    def __init__(self, te: Any, settings: Any) -> None:
        super().__init__()
        self.linear = te.GroupedLinear(2, WIDTH, WIDTH, **settings)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.reshape(-1, WIDTH), [_TOKENS // 2 + 3, _TOKENS // 2 - 3])
        return output


class _Together(torch.nn.Module):
    """A normed linear, a row parallel one, and experts: (s, b, 64) -> (s * b, 64)."""

    def __init__(self, te: Any, settings: Any) -> None:
        super().__init__()
        self.up = te.LayerNormLinear(WIDTH, 2 * WIDTH, parallel_mode="column", **settings)
        self.down = te.Linear(2 * WIDTH, WIDTH, parallel_mode="row", **settings)
        self.experts = _Experts(te, settings)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x + self.down(torch.nn.functional.gelu(self.up(x))))
        return output


# How to build each, and how many of its modules are split.
KINDS: dict[str, tuple[Callable[[Any, Any], torch.nn.Module], int]] = {
    "Linear": (lambda te, settings: te.Linear(WIDTH, WIDTH, **settings), 1),
    "Linear, column parallel": (lambda te, s: te.Linear(WIDTH, WIDTH, parallel_mode="column", **s), 1),
    "Linear, row parallel": (lambda te, s: te.Linear(WIDTH, WIDTH, parallel_mode="row", **s), 1),
    "LayerNormLinear": (lambda te, settings: te.LayerNormLinear(WIDTH, WIDTH, **settings), 1),
    "GroupedLinear": (_Experts, 1),
    "all in one model": (_Together, 3),
    # Megatron builds none; in a model it stays whole.
    "LayerNormMLP": (lambda te, settings: te.LayerNormMLP(WIDTH, 2 * WIDTH, **settings), 0),
}


def cases(device: str) -> Iterator[Case]:
    """All of them, on ``device``."""
    orders = (helpers.SEVERAL_I_AHEAD, LAST_W_FIRST)
    for kind, bias, fused, order in itertools.product(KINDS, (True, False), (False, True), orders):
        yield Case(kind, bias, fused, order, device)


def check(case: Case) -> None:
    """Outputs, input gradients and gradients are the same bits, and hooks fire as often.

    Raises:
        AssertionError: naming what differs.
    """
    from megatron.schedules.integration.gpu_libraries import te_fault
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    fault = te_fault()
    assert fault is None, fault
    build, modules = KINDS[case.kind]
    settings = {"params_dtype": torch.bfloat16, "bias": case.bias, "fuse_wgrad_accumulation": case.fused}
    torch.manual_seed(1)
    whole = build(importlib.import_module("transformer_engine.pytorch"), settings | {"device": case.device})
    ours, store = copy.deepcopy(whole), WeightGradients()
    found = split_te_linears(ours, store)
    assert found == modules, f"{found} modules are split, not {modules}"
    hooks, our_hooks = (helpers.MainGrads(model, torch.float32) for model in (whole, ours))
    xs, our_xs = (_inputs(case) for _ in range(2))
    outputs = helpers.stock(whole, xs)
    helpers.assert_same("output", helpers.split(partial(ours), our_xs, store, case.order), outputs)
    helpers.assert_same("input gradient", [x.grad for x in our_xs], [x.grad for x in xs])
    parameters, our_parameters = dict(whole.named_parameters()), dict(ours.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.main_grad.abs().sum() > 0, f"{name} has no gradient to compare"  # type: ignore[attr-defined]
        helpers.assert_same(name, [our_parameters[name].main_grad], [parameter.main_grad])  # type: ignore[attr-defined]
    assert our_hooks.fired == hooks.fired == dict.fromkeys(parameters, case.order.count("F"))


def _inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(case.order.count("F"), SEQUENCE, BATCH, WIDTH, generator=generator)
    return [x.to(case.device, torch.bfloat16).requires_grad_() for x in drawn]
