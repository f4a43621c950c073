"""What has gone wrong with split backwards before, each once: see the name of each check."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import split_helpers as helpers
import torch
from fused_kernels import fused_kernels
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.tolerances import assert_within, orders_apart


def nothing_current_is_stock() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    model, store = helpers.block(), WeightGradients()
    split_linears(model, store)
    (x,) = helpers.inputs_of(1, torch.float32)
    y = model(x)
    assert "LinearWithGradAccumulation" in type(y.grad_fn).__name__
    helpers.loss(y).backward()
    assert model.up.weight.grad is not None
    with store.split(0, 0), torch.no_grad():
        model(x)
    assert store.waiting(0, 0) == 0
    with store.split(0, 0):
        assert "SplitLinear" in type(model(x).grad_fn).__name__


def frozen_parameters() -> None:
    model = helpers.block()
    model.up.weight.requires_grad_(False)
    model.up.bias.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    helpers.compare(model, SEVERAL_I_AHEAD)
    from megatron.schedules.integration.linears.local import split_linears

    store = WeightGradients()
    split_linears(model, store)
    with store.split(0, 0):
        y = model(*helpers.inputs_of(1, torch.float32))
    with store.input_gradient(0, 0):
        helpers.loss(y).backward()
    assert store.waiting(0, 0) == 2, "a frozen weight has no W"


def nothing_below_needs_a_gradient() -> None:
    def no_gradients(*arguments: Any) -> list[Tensor]:
        return [x.detach() for x in helpers.inputs_of(*arguments)]

    model = helpers.block()
    model.norm.requires_grad_(False)
    helpers.compare(model, SEVERAL_I_AHEAD, inputs=no_gradients)


def weight_passed_in() -> None:
    torch.manual_seed(1)
    settings = helpers.config()

    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 8))
            self.block = helpers.Block(settings, head_weight=self.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    model = Owner()
    assert copy.deepcopy(model).block.head.weight is None
    helpers.compare(model, SEVERAL_I_AHEAD)


def weight_tied_to_an_embedding() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    torch.manual_seed(1)
    tokens = [torch.randint(16, (SEQUENCE, BATCH)) for _ in range(3)]
    weight = torch.nn.Parameter(torch.randn(16, 8))
    model = helpers.Block(helpers.config(), head_weight=weight)

    def forward(x: Tensor) -> Tensor:
        return model(torch.nn.functional.embedding(x, weight))

    # The same bits on both sides, of which stock adds those of one microbatch first, and split those of the embedding.
    parts: list[Tensor] = []
    for own in tokens:
        apart = weight.detach().clone().requires_grad_()
        y = model(torch.nn.functional.embedding(own, apart))
        parts += torch.autograd.grad(helpers.loss(y), (apart, weight))
    helpers.stock(forward, tokens)
    stocks, weight.grad = weight.grad, None
    store = WeightGradients()
    split_linears(model, store)
    helpers.split(forward, tokens, store, SEVERAL_I_AHEAD)
    assert len(parts) == 6 and stocks is not None and weight.grad is not None
    for found in (stocks, weight.grad):
        assert_within(found, torch.stack(parts).double().sum(0), orders_apart(parts))
    assert_within(weight.grad, stocks, orders_apart(parts))


def weight_used_several_times() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        hidden = module.hidden(x)
        return module.head(hidden)[0] + module.head(hidden.tanh())[0] * module.head(hidden.cos())[0]

    helpers.compare(helpers.block(), SEVERAL_I_AHEAD, forward=forward)


def recomputed_once() -> None:
    from megatron.core import tensor_parallel

    calls = []

    def forward(module: Any, x: Tensor) -> Tensor:
        def hidden(t: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return module.hidden(t)

        return module.head(tensor_parallel.checkpoint(hidden, False, x))[0]

    helpers.compare(helpers.block(), SEVERAL_I_AHEAD, forward=forward)
    # Three microbatches, stock and split: once without gradients in F, once with in the backward.
    assert calls.count(False) == calls.count(True) == 6


def fused_accumulation_adds_once() -> None:
    for dtype, zero_out in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        with fused_kernels() as kernels:
            model = helpers.block(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
            helpers.compare(model, SEVERAL_I_AHEAD, main_grad=dtype, zero_out=zero_out)
        # Twice 3 linears x 3 microbatches. Run twice within a split, main_grad would be doubled in silence.
        assert kernels.calls["fp32" if dtype is torch.float32 else "fp16"] == 18


def hooks_fire_under_fused_accumulation_while_a_meter_counts() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    found = []
    for metered, zero_out, whole in itertools.product((False, True), (False, True), (False, True)):
        with fused_kernels() as kernels:
            model = helpers.block(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
            hooks = helpers.MainGrads(model, torch.float32, zero_out)
            meter = ActivationMeter(model.parameters())
            store = WeightGradients(meter if metered else None)
            split_linears(model, store)
            for m, x in enumerate(helpers.inputs_of(2, torch.bfloat16)):
                with meter.recording() if metered else nullcontext():
                    with nullcontext() if whole else store.split(0, m):
                        loss = helpers.loss(model(x))
                    with nullcontext() if whole else store.input_gradient(0, m):
                        loss.backward()
                if not whole:
                    store.run(0, m)
            assert kernels.calls == {"fp32": 6, "fp16": 0} and meter.current == 0
        assert set(hooks.fired.values()) == {2}
        assert all(linear.weight.grad_added_to_main_grad for linear in (model.up, model.down, model.head))
        found.append([parameter.main_grad for parameter in model.parameters()])
    for each in found[1:]:
        helpers.assert_same("main_grad", each, found[0])


def what_changes_between_microbatches_counts() -> None:
    """Forwards of one call share how a linear is used, as long as it stays as it is."""
    from megatron.schedules.integration.linears.local import split_linears

    model, store, memory = helpers.block(), WeightGradients(), torch.ones(32, 8)
    split_linears(model, store)
    up, (x,) = model.up, helpers.inputs_of(1, torch.float32)
    changes: list[tuple[Callable[[], Any], set[str]]] = [
        (lambda: None, {"weight", "bias"}),
        (lambda: setattr(up.weight, "data", memory), {"weight", "bias"}),
        (lambda: setattr(up, "weight", torch.nn.Parameter(2 * memory)), {"weight", "bias"}),
        (lambda: up.bias.requires_grad_(False), {"weight"}),
        (lambda: up.weight.requires_grad_(False), set()),
        (lambda: (up.weight.requires_grad_(True), up.bias.requires_grad_(True)), {"weight", "bias"}),
    ]
    with store.keeping_graphs():
        for number, (change, trained) in enumerate(changes):
            change()
            for key in ((0, 2 * number), (0, 2 * number + 1)):
                up.weight.grad = None
                with store.split(*key):
                    output, _ = up(x)
                assert torch.equal(output, x @ up.weight.t() + up.bias), number
                with store.input_gradient(*key):
                    output.backward(torch.ones_like(output))
                assert store.parameters(*key) == {getattr(up, name) for name in trained}, number
                store.run(*key)
                expected = torch.ones(len(x.flatten(0, -2)), 32).t() @ x.flatten(0, -2)
                assert not trained or torch.equal(up.weight.grad, expected), number


def a_new_main_grad_counts() -> None:
    """A backward in the forward is stock's, and adds to that of the leaf."""
    from megatron.schedules.integration.linears.local import split_linears

    with fused_kernels():
        model, store = helpers.block(dtype=torch.bfloat16, gradient_accumulation_fusion=True), WeightGradients()
        helpers.MainGrads(model, torch.float32)
        split_linears(model, store)
        (x,), added = helpers.inputs_of(1, torch.bfloat16), []
        with store.keeping_graphs():
            for key in ((0, 0), (0, 1)):
                model.up.weight.main_grad = torch.zeros(32, 8)
                with store.split(*key):
                    model.up(x)[0].sum().backward()
                store.run(*key)
                added.append(model.up.weight.main_grad)
    assert added[0].abs().sum() > 0 and torch.equal(*added)


def memory_is_flat() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    model = helpers.block()
    meter = ActivationMeter(model.parameters())
    store = WeightGradients(meter)
    split_linears(model, store)
    hooks = helpers.MainGrads(model, torch.float32)

    def tensors() -> int:
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    held, alive = [], []
    gc.collect()
    gc.disable()
    for m in range(50):
        (x,) = helpers.inputs_of(1, torch.float32)
        with store.split(0, m), meter.recording():
            y = model(x)
            loss = helpers.loss(y)
        with store.input_gradient(0, m), meter.recording():
            loss.backward()
        del y, loss, x
        # What the graph held for the linears lives on from I to W: three inputs and three output gradients.
        held.append(meter.current)
        if m >= 2:
            store.run(0, m - 2)
            alive.append(tensors())
    gc.enable()
    tokens = SEQUENCE * BATCH * 4
    assert held[0] == tokens * ((8 + 32) + (32 + 8) + (8 + 16))
    assert held[2:] == [3 * held[0]] * 48
    assert len(set(alive)) == 1
    assert hooks.fired["up.weight"] == 48
    store.run(0, 48)
    store.run(0, 49)
    assert meter.current == 0


def kept_whole() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron.schedules.integration.linears.local import is_split, split_linears

    model, store = helpers.block(), WeightGradients()
    model.head.config.defer_embedding_wgrad_compute = True
    split_linears(model, store)
    assert not model.head.config.defer_embedding_wgrad_compute, "each W has its place in the schedule"
    (x,) = helpers.inputs_of(1, torch.float32)
    arguments = {
        "bias": None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "tp_group": None,
    }
    with store.input_gradient(0, 0):
        model.up._forward_impl(input=x, weight=model.up.weight * 2, **arguments).sum().backward()
    assert model.up.weight.grad is not None, "a weight that is not a leaf gets its gradient in the backward"
    assert store.waiting(0, 0) == 0

    class Own(ColumnParallelLinear):
        def _forward_impl(self, *arguments: Any, **settings: Any) -> Tensor:
            return super()._forward_impl(*arguments, **settings)

    own = Own(8, 8, config=helpers.config(), init_method=torch.nn.init.normal_)
    assert split_linears(own, store) == 0 and not is_split(own)


def the_class_is_left_alone() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron.schedules.integration.linears.local import is_split, split_linears

    model = helpers.block()
    before = list(model.state_dict())
    untouched = ColumnParallelLinear.__dict__["_forward_impl"]
    first, second = WeightGradients(), WeightGradients()
    assert split_linears(model, first) == split_linears(model, second) == 3
    assert is_split(model.up) and not is_split(model.norm)
    (x,) = helpers.inputs_of(1, torch.float32)
    with first.split(0, 0), second.input_gradient(0, 0):
        helpers.loss(model(x)).backward()
    assert (first.waiting(0, 0), second.waiting(0, 0)) == (0, 3), "bound anew, not bound twice"
    assert list(model.state_dict()) == before
    assert ColumnParallelLinear.__dict__["_forward_impl"] is untouched
    assert not is_split(helpers.block().up)


def write_between_i_and_w() -> None:
    from megatron.schedules.integration.linears.local import split_linears

    model, store = helpers.block(), WeightGradients()
    split_linears(model, store)
    (x,) = helpers.inputs_of(1, torch.float32)
    with store.split(0, 0):
        y = model(x)
    gradient = torch.ones_like(y)
    with store.input_gradient(0, 0):
        torch.autograd.backward(y, gradient)
    gradient.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place after its I"):
        store.run(0, 0)


def what_does_not_split_is_reported() -> None:
    """Of a frozen weight, of a linear of torch's, and of a weight that its linear shares with a regularizer."""
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.log.run_log import seen

    model, store = helpers.block(), WeightGradients()
    model.config, model.adapter = model.up.config, torch.nn.Linear(8, 8)
    model.up.weight.requires_grad_(False)
    for shared in (model.head.weight, model.down.bias):
        shared.register_hook(lambda gradient: gradient)
    split_linears(model, store)
    (x,) = helpers.inputs_of(1, torch.float32)
    with store.split(0, 0):
        loss = helpers.loss(model(model.adapter(x))) + model.head.weight.square().sum()
    with store.input_gradient(0, 0):
        loss.backward()
    store.run(0, 0)
    found = seen([model], None, 0, None, store.leaves.partial)
    assert found.linears == {"ColumnParallelLinear": 1, "RowParallelLinear": 1}
    assert found.whole == {
        ("ColumnParallelLinear", "frozen weight"): 1,
        ("Linear", "not Megatron's or Transformer Engine's"): 1,
    }
    assert found.partial == ["head.weight"]


@contextmanager
def _autocast_of_products() -> Iterator[list[torch.dtype | None]]:
    """Notes the autocast of a GPU's products that is on at each product of a weight gradient."""
    seen: list[torch.dtype | None] = []
    product = Tensor.matmul

    def matmul(self: Tensor, other: Tensor) -> Tensor:
        seen.append(torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None)
        return product(self, other)

    with patch.object(Tensor, "matmul", matmul):
        yield seen


def w_has_the_autocast_of_its_forward() -> None:
    """On a CPU products heed no autocast of a GPU's, but it can be on."""
    from megatron.schedules.integration.linears.local import split_linears

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    model, store = helpers.block(), WeightGradients()
    split_linears(model, store)
    for microbatch, x in enumerate(helpers.inputs_of(2, torch.float32)):
        with store.split(0, microbatch), torch.autocast("cuda", torch.float16, enabled=microbatch == 0):
            y = model(x)
        with store.input_gradient(0, microbatch):
            helpers.loss(y).backward()
    for microbatch, expected in enumerate((torch.float16, None)):
        with _autocast_of_products() as seen:
            store.run(0, microbatch)
        assert seen and set(seen) == {expected}, seen


TRAPS = (
    what_does_not_split_is_reported,
    nothing_current_is_stock,
    frozen_parameters,
    nothing_below_needs_a_gradient,
    weight_passed_in,
    weight_tied_to_an_embedding,
    weight_used_several_times,
    recomputed_once,
    fused_accumulation_adds_once,
    hooks_fire_under_fused_accumulation_while_a_meter_counts,
    memory_is_flat,
    kept_whole,
    what_changes_between_microbatches_counts,
    a_new_main_grad_counts,
    the_class_is_left_alone,
    write_between_i_and_w,
    w_has_the_autocast_of_its_forward,
)


def _all_traps() -> dict[str, str]:
    return helpers.failures_of(TRAPS)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Tracebacks by trap; all run in one process, for starting one takes longer than they do."""
    return helpers.run_ranks(1, _all_traps)[0]


@pytest.mark.job
@pytest.mark.parametrize("trap", [trap.__name__ for trap in TRAPS])
def test_trap(trap: str, failures: dict[str, str]):
    assert trap not in failures, failures[trap]


def _autocast() -> None:
    model = helpers.block().cuda()

    def on_gpu(*arguments: Any) -> list[Tensor]:
        return [x.detach().cuda().requires_grad_() for x in helpers.inputs_of(*arguments)]

    def forward(module: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return module(x)

    helpers.compare(model, SEVERAL_I_AHEAD, forward=forward, inputs=on_gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="stock's linears know autocast on a GPU only")
def test_weight_gradients_run_under_the_autocast_of_their_forward():
    helpers.run_ranks(1, _autocast)
