"""Transformer Engine's linears with a split backward give, bit for bit, the gradients of their whole backward.

Over its own Python on the CPU; where there is a GPU see ``test_te_itself.py``.
"""

from __future__ import annotations

import gc
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import split_helpers as helpers
import torch
from split_helpers import BATCH, SEQUENCE, SEVERAL_I_AHEAD, TOGETHER
from split_te_helpers import EXPERTS, Block, Experts, bound, compare, linear, tensor_parallel
from torch import Tensor

from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.schedule.kinds import Kind
from tests.integration.server import VERSIONS, Megatron
from tests.integration.te_itself import LAST_W_FIRST

VERSION = re.escape(VERSIONS[-1])


def _matrix(sequence_parallel: bool) -> None:
    settings = tensor_parallel() | {"sequence_parallel": sequence_parallel}
    for bias, fused, shares, order, (dtype, main_grad) in itertools.product(
        (True, False),
        (True, False),
        (True, False),
        (TOGETHER, SEVERAL_I_AHEAD, LAST_W_FIRST),
        ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)),
    ):
        block = Block(bias=bias, fuse_wgrad_accumulation=fused, params_dtype=dtype, **settings)
        assert compare(block, order, main_grad=main_grad, shares=shares).split == 3


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gradients_are_bit_equal_to_the_whole_backward(te: Megatron, tp: int, sequence_parallel: bool):
    te("in_groups", tp, _matrix, sequence_parallel, tensor_model_parallel_size=tp)


def _data_parallel(overlap: bool, distributed_optimizer: bool) -> None:
    from megatron.schedules.integration.linears.transformer_engine import split_te_linears

    for fused in (False, True):
        block = Block(params_dtype=torch.bfloat16, fuse_wgrad_accumulation=fused)
        helpers.data_parallel(block, split_te_linears, overlap, distributed_optimizer)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_data_parallel_reduces_once_after_the_last_weight_gradient(
    te: Megatron, overlap: bool, distributed_optimizer: bool
):
    te("in_groups", 2, _data_parallel, overlap, distributed_optimizer)


def grouped_linears() -> None:
    each = (True, False)
    for bias, fused, shares, order in itertools.product(each, each, each, (SEVERAL_I_AHEAD, LAST_W_FIRST)):
        assert compare(Experts(bias=bias, fuse_wgrad_accumulation=fused), order, shares=shares).split == 2


def linears_that_share_a_weight() -> None:
    class Tied(torch.nn.Module):
        def __init__(self, *, fused: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = (linear("Linear", 8, 8, fuse_wgrad_accumulation=fused) for _ in range(2))
            self.second.weight = self.first.weight
            # In the first microbatch stock's backward of one overwrites the other's fused gradient.
            self.first.is_first_microbatch = self.second.is_first_microbatch = False

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())  # type: ignore[no-any-return]

    for fused, shares in itertools.product((True, False), (True, False)):
        assert compare(Tied(fused=fused), once=False, shares=shares).split == 2


def grouped_linears_that_share_some_weights() -> None:
    class Tied(torch.nn.Module):
        def __init__(self, tied: tuple[str, str], *, fused: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linears = torch.nn.ModuleList(
                linear("GroupedLinear", 2, 8, 8, bias=False, fuse_wgrad_accumulation=fused) for _ in range(2)
            )
            setattr(self.linears[1], tied[1], getattr(self.linears[0], tied[0]))
            for each in self.linears:
                each.is_first_microbatch = False

        def forward(self, x: Tensor) -> Tensor:
            splits = [5, SEQUENCE * BATCH - 5]
            output: Tensor = self.linears[1](self.linears[0](x.reshape(-1, 8), splits).tanh(), splits)
            return output

    ties = itertools.product(("weight0", "weight1"), repeat=2)
    for tied, fused, shares in itertools.product(ties, (True, False), (True, False)):
        assert compare(Tied(tied, fused=fused), once=False, shares=shares).split == 2, tied


def the_idle_expert_gets_zeros() -> None:
    model = Experts(second=0)
    store = bound(model)
    with store.input_gradient(0, 0):
        helpers.loss(model(*helpers.inputs_of(1, torch.float32))).backward()
    assert model.up.weight1.grad is None, "what the backward reports for it is not filled yet"
    store.run(0, 0)
    for grouped in (model.up, model.down):
        assert torch.equal(grouped.weight1.grad, torch.zeros_like(grouped.weight1))
        assert torch.equal(grouped.bias1.grad, torch.zeros_like(grouped.bias1))


def grouped_memory_to_be_filled_is_not_held() -> None:
    def of_weights() -> set[int]:
        """The places of all tensors with the shape of a weight."""
        tensors = (thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter))
        return {tensor.data_ptr() for tensor in tensors if tensor.shape in ((16, 8), (8, 16))}

    model = Experts()
    store, before = bound(model), of_weights()
    with store.input_gradient(0, 0):
        output = helpers.loss(model(*helpers.inputs_of(1, torch.float32)))
        output.backward()
    # The graph is still there, and with it what stood for the weights.
    assert len(before) >= 2 * EXPERTS and of_weights() <= before
    store.run(0, 0)


@contextmanager
def _handed_over(change: Callable[[list[Any], Any], tuple[list[Any], Any]]) -> Iterator[None]:
    """Lets Transformer Engine hand over other operands, and a function of those."""
    from megatron.schedules.integration.linears.transformer_engine import _Call

    put = _Call.put
    with mock.patch.object(_Call, "put", lambda self, operands, function: put(self, *change(operands, function))):
        yield


def grouped_tensors_are_counted_and_watched() -> None:
    seen: list[Tensor] = []
    rows = SEQUENCE * BATCH
    splits = [5, rows - 5]

    def in_storages(operands: list[Any], product: Any) -> tuple[list[Any], Any]:
        """One storage of all experts' rows, as 2.17 and later can hand over."""
        xs, dys, outs = operands
        stored = [SimpleNamespace(rowwise_data=torch.cat(each), size=lambda: (rows, 8)) for each in (xs, dys)]
        seen.extend(each.rowwise_data for each in stored)

        def unpacked(x: Any, dy: Any, outs: Any) -> Any:
            return product(list(x.rowwise_data.split(splits)), list(dy.rowwise_data.split(splits)), outs)

        return [*stored, outs], unpacked

    model = linear("GroupedLinear", 2, 8, 16)
    meter = ActivationMeter(model.parameters())
    store = bound(model, meter)
    with store.input_gradient(0, 0), _handed_over(in_storages):
        helpers.loss(model(*(x.view(-1, 8) for x in helpers.inputs_of(1, torch.float32)), splits)).backward()
    assert meter.current == 4 * rows * (8 + 16)
    seen[0].add_(1)
    with pytest.raises(RuntimeError, match="modified in place after its I"):
        store.run(0, 0)


def biases_handed_on() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = linear("Linear", 8, 8, return_bias=True)
            self.experts = linear("GroupedLinear", 2, 8, 8, return_bias=True)

        def forward(self, x: Tensor) -> Tensor:
            y, bias = self.linear(x)
            z, biases = self.experts((y + bias).tanh().reshape(-1, 8), [4, SEQUENCE * BATCH - 4])
            return z + biases[0] * biases[1]

    assert compare(Model()).split == 2


def hooks_fire_in_w() -> None:
    for fused in (False, True):
        model = Block(fuse_wgrad_accumulation=fused)
        store, hooks = bound(model), helpers.MainGrads(model, torch.float32)
        with store.input_gradient(0, 0):
            helpers.loss(model(*helpers.inputs_of(1, torch.float32))).backward()
        # The row parallel linear adds its bias after its reduction; that gradient is autograd's, as a norm's is.
        with_i = {"up.layer_norm_weight", "up.layer_norm_bias", "down.bias"}
        assert {name for name, count in hooks.fired.items() if count} == with_i
        assert not any(p.main_grad.any() for name, p in model.named_parameters() if name not in with_i)
        store.run(0, 0)
        assert set(hooks.fired.values()) == {1}


def frozen_parameters() -> None:
    model = Block()
    for parameter in (model.up.weight, model.up.bias):  # Transformer Engine's biases go with their weights
        parameter.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    compare(model)
    experts = Experts()
    experts.up.weight0.requires_grad_(False)
    for models, waiting in ((model, 2), (experts, 1)):
        store = bound(models)
        with store.input_gradient(0, 0):
            helpers.loss(models(*helpers.inputs_of(1, torch.float32))).backward()
        assert store.waiting(0, 0) == waiting, "a frozen weight has no W"
        store.run(0, 0)
    assert model.head.bias.grad is None


def nothing_below_needs_a_gradient() -> None:
    def no_gradients(*arguments: Any) -> list[Tensor]:
        return [x.detach() for x in helpers.inputs_of(*arguments)]

    model = Block()
    model.up.layer_norm_weight.requires_grad_(False)
    model.up.layer_norm_bias.requires_grad_(False)
    compare(model, inputs=no_gradients)


def used_several_times() -> None:
    for fused in (False, True):
        model = Block(fuse_wgrad_accumulation=fused)
        for each in (model.up, model.down, model.head):
            # With two uses Transformer Engine's whole backward loses the one that does not overwrite.
            each.is_first_microbatch = False
        compare(model, forward=lambda module, x: module(x) * module(x.cos()))


def a_whole_backward_of_the_first_microbatch_adds_to_the_others() -> None:
    found = []
    for split in (False, True):
        torch.manual_seed(1)
        model = linear("Linear", 8, 8, fuse_wgrad_accumulation=True)
        store, _ = bound(model), helpers.MainGrads(model, torch.float32)
        first, second = helpers.inputs_of(2, torch.float32)
        output = model(first)
        with store.input_gradient(0, 1) if split else nullcontext():
            other = helpers.loss(model(second))
            if split:
                other.backward()
        if split:
            store.run(0, 1)
        helpers.loss(output).backward()
        if not split:
            other.backward()
        found.append(model.weight.main_grad)
    assert found[0].any()
    helpers.assert_same("sums of two", [found[1]], [found[0]])


def a_backward_of_user_code_runs_a_fused_weights_hooks() -> None:
    """Also when its leaves are not heard any more."""
    model = linear("Linear", 8, 8, fuse_wgrad_accumulation=True)
    store, hooks = bound(model), helpers.MainGrads(model, torch.float32)
    for microbatch in range(3):
        with store.split(0, microbatch):
            helpers.loss(model(*helpers.inputs_of(1, torch.float32))).backward()
            assert hooks.fired["weight"] == 2 * microbatch + 1
            loss = helpers.loss(model(*helpers.inputs_of(1, torch.float32)))
        with store.input_gradient(0, microbatch):
            loss.backward()
        store.run(0, microbatch)
        assert hooks.fired["weight"] == 2 * microbatch + 2


def zeros_are_added_where_that_is_asked_for() -> None:
    compare(Block(fuse_wgrad_accumulation=True), zero_out=True)


def recomputed_once() -> None:
    from megatron.core import tensor_parallel

    calls = []

    def forward(module: Any, x: Tensor) -> Tensor:
        def hidden(t: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return module.down(torch.nn.functional.gelu(module.up(t)))

        return module.head(tensor_parallel.checkpoint(hidden, False, x))

    for fused in (False, True):
        compare(Block(fuse_wgrad_accumulation=fused), forward=forward)
    assert calls.count(False) == calls.count(True) == 24


def evaluation_and_whole_backwards_are_untouched() -> None:
    model = Block()
    store = bound(model)
    (x,) = helpers.inputs_of(1, torch.float32)
    with store.split(0, 0), torch.no_grad():
        model(x)
    assert store.waiting(0, 0) == 0
    store.run(0, 0)
    hooks = helpers.MainGrads(model, torch.float32)
    helpers.loss(model(x)).backward()
    assert set(hooks.fired.values()) == {1}


def a_module_is_itself_after_its_forward() -> None:
    model = Block()
    names, before = list(model.state_dict()), dict(model.named_parameters())
    stores = [linear.wgrad_store for linear in (model.up, model.down, model.head)]
    store = bound(model)
    with store.split(0, 0):
        model(*helpers.inputs_of(1, torch.float32))
        with pytest.raises(AssertionError, match="GEMM not possible"):
            model(torch.zeros(SEQUENCE, BATCH, 7))
    assert [linear.wgrad_store for linear in (model.up, model.down, model.head)] == stores
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.up.weight is before["up.weight"]


def bound_again_to_a_newer_store() -> None:
    model = Block()
    older, newer = bound(model), bound(model)
    with newer.input_gradient(0, 0):
        helpers.loss(model(*helpers.inputs_of(1, torch.float32))).backward()
    assert (older.waiting(0, 0), newer.waiting(0, 0)) == (0, 3)
    newer.run(0, 0)


def the_binding_of_a_model_splits_them_where_stocks_backward_will_not_do() -> None:
    from megatron.schedules.integration.linears.transformer_engine import is_split
    from megatron.schedules.integration.model_binding import ModelBinding

    model, binding = Block(), ModelBinding(object())
    for stocks, expected in ((True, False), (False, True), (True, True)):
        binding.weight_gradients([model], stocks=stocks)
        assert [is_split(linear) for linear in (model.up, model.down, model.head)] == [expected] * 3


def kept_whole() -> None:
    from megatron.schedules.integration.linears.transformer_engine import _why_whole, is_split

    weight = torch.nn.Parameter(torch.zeros(8, 8))
    assert _why_whole({"weight": weight}, {}) is None
    weight.is_distributed_weight = True  # type: ignore[attr-defined] # that of 2.19, which needs its own groups
    assert _why_whole({"weight": weight}, {}) == "distributed weight"

    model = Block()
    model.up.weight.overwrite_main_grad = True
    model.down.weight.__fsdp_param__ = True
    replaced = model.head.forward
    model.head.forward = lambda *arguments: replaced(*arguments)
    store = bound(model)
    assert [is_split(linear) for linear in (model.up, model.down, model.head)] == [True, True, False]
    with store.input_gradient(0, 0):
        helpers.loss(model(*helpers.inputs_of(1, torch.float32))).backward()
    assert store.waiting(0, 0) == 0
    assert all(p.grad is not None for p in model.parameters())
    store.run(0, 0)


def what_changes_between_microbatches_counts() -> None:
    """Forwards of one call share leaves, as long as those are the weight's."""
    model = linear("Linear", 8, 8, bias=False)
    store, memory = bound(model), torch.ones(8, 8)
    (x,) = helpers.inputs_of(1, torch.float32)

    changes: list[tuple[Callable[[], Any], int]] = [
        (lambda: None, 1),
        (lambda: setattr(model.weight, "data", memory), 1),
        (lambda: setattr(model, "weight", torch.nn.Parameter(memory)), 1),
        (lambda: model.weight.requires_grad_(False), 0),
        (lambda: model.weight.requires_grad_(True), 1),
        (lambda: setattr(model.weight, "overwrite_main_grad", True), 0),
    ]
    with store.keeping_graphs(), store.input_gradient(0, 0):
        model(x).sum().backward()  # from then on no backward need be heard
    store.run(0, 0)
    with store.keeping_graphs():
        for number, (change, waiting) in enumerate(changes):
            change()
            for key in ((0, 2 * number), (0, 2 * number + 1)):
                with store.input_gradient(*key):
                    output = model(x)
                    assert torch.equal(output, torch.nn.functional.linear(x, model.weight)), number
                    output.sum().backward()
                assert store.waiting(*key) == waiting, number
                before = 0 if model.weight.grad is None else model.weight.grad.sum()
                store.run(*key)
                assert not waiting or model.weight.grad.sum() != before, number


def a_bias_trained_from_the_second_microbatch_on_gets_its_gradient() -> None:
    model = linear("Linear", 8, 8)
    store, (x,) = bound(model), helpers.inputs_of(1, torch.float32)
    for trained in ((True,), (False, True, True)):
        with store.keeping_graphs():
            for m, trains in enumerate(trained):
                model.bias.requires_grad_(trains)
                model.bias.grad = None
                with store.input_gradient(0, m):
                    model(x).sum().backward()
                assert model.bias.grad is None
                store.run(0, m)
                assert (model.bias.grad is not None) == trains


def weights_replaced_for_a_run_within_a_forward() -> None:
    """Or frozen for one, as a teacher's or a discriminator's are; the first microbatch has no such run."""
    models = [Block(bias=False) for _ in range(2)]
    store = bound(models[1])

    def forward(model: Any, x: Tensor, microbatch: int) -> Tensor:
        output, weight = model(x), model.down.weight
        own = weight.data
        if microbatch == 1:
            weight.data = own.flip(0)
            with torch.no_grad():
                output = output * model(x)
            weight.data = own
        elif microbatch == 2:
            weight.requires_grad_(False)
            output = output * model(x)
            weight.requires_grad_(True)
        return output + weight.square().sum()  # type: ignore[no-any-return]

    for microbatches in (1, 4):
        with store.keeping_graphs():
            for m in range(microbatches):
                (x,) = helpers.inputs_of(1, torch.float32)
                helpers.loss(forward(models[0], x, m)).backward()
                with store.split(0, m):
                    loss = helpers.loss(forward(models[1], x, m))
                with store.input_gradient(0, m):
                    loss.backward()
                store.run(0, m)
                for (name, own), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
                    assert torch.allclose(own.grad, other.grad, rtol=1e-5, atol=1e-6), (m, name)


def the_first_microbatch_is_still_one_for_caches_of_quantised_weights() -> None:
    model = linear("Linear", 8, 8)
    bound(model)
    assert model.is_first_microbatch


def memory_is_flat() -> None:
    model = Block(bias=False)
    meter = ActivationMeter(model.parameters())
    store = bound(model, meter)
    hooks = helpers.MainGrads(model, torch.float32)
    held, alive = [], []
    gc.collect()
    gc.disable()
    for m in range(20):
        (x,) = helpers.inputs_of(1, torch.float32)
        with store.split(0, m), meter.recording():
            loss = helpers.loss(model(x))
        with store.input_gradient(0, m), meter.recording():
            loss.backward()
        del loss, x
        held.append(meter.current)
        if m >= 2:
            store.run(0, m - 2)
            alive.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    gc.enable()
    tokens = SEQUENCE * BATCH * 4
    assert held[0] == tokens * ((8 + 32) + (32 + 8) + (8 + 16))
    assert held[2:] == [3 * held[0]] * 18
    assert len(set(alive)) == 1
    assert hooks.fired["up.weight"] == 18


def a_gradient_that_was_not_delayed_is_no_secret() -> None:
    from megatron.schedules.integration.linears.transformer_engine import _Call

    model = linear("Linear", 8, 8)
    store = bound(model)
    with store.split(0, 0), mock.patch.object(_Call, "delay_wgrad_compute", lambda self: False):
        y = model(*helpers.inputs_of(1, torch.float32))
    with (
        pytest.raises(RuntimeError, match=rf"Transformer Engine {VERSION} did not delay the weight gradient of a Mega"),
        store.input_gradient(0, 0),
    ):
        helpers.loss(y).backward()


def a_gradient_that_later_was_not_delayed_is_no_secret() -> None:
    """Its leaves are not heard any more, as one I has shown that it delays."""
    from megatron.schedules.integration.linears.transformer_engine import _Call

    model = linear("Linear", 8, 8)
    store = bound(model)
    for key in ((0, 0), (0, 1)):
        later = mock.patch.object(_Call, "delay_wgrad_compute", lambda self: False) if key[1] else nullcontext()
        with store.split(*key), later:
            y = model(*helpers.inputs_of(1, torch.float32))
        with store.input_gradient(*key):
            helpers.loss(y).backward()
        lost = pytest.raises(RuntimeError, match=r"shape \(8, 8\) was computed in I and not deferred to W")
        with lost if key[1] else nullcontext():
            store.run(*key)


def a_backward_that_reads_its_settings_elsewhere_is_no_secret() -> None:
    from megatron.schedules.integration.linears import transformer_engine

    model = linear("Linear", 8, 8)
    store = bound(model)
    elsewhere = mock.patch.object(transformer_engine, "_STEPS_AFTER", 0)
    with elsewhere, store.split(0, 0), pytest.raises(RuntimeError, match="does not say where its backward reads"):
        model(*helpers.inputs_of(1, torch.float32))


def an_instance_of_another_make() -> None:
    model = linear("Linear", 8, 8)
    del model.wgrad_store, model.apply_bias
    with pytest.raises(RuntimeError, match=rf"Transformer Engine {VERSION}: Megatrons has no wgrad_store, apply_bias"):
        bound(model)


def what_cannot_be_split_is_refused() -> None:
    import megatron.training  # noqa: F401 - before it Transformer Engine is not looked for

    from megatron.schedules.estimate.parallel_sizes import ParallelSizes
    from megatron.schedules.integration.flags.declared import FLAGS
    from megatron.schedules.integration.machine import machine_of
    from megatron.schedules.job.rules import refusal
    from megatron.schedules.job.spec import JobSpec, Settings, StockFlags
    from megatron.schedules.job.values import ScheduleChoice

    def refusals(
        schedule: str, *given: str, transformer_impl: str = "transformer_engine", fp8_recipe: str = ""
    ) -> list[str]:
        stock = StockFlags(frozenset(given), transformer_impl, fp8_recipe=fp8_recipe)
        spec = JobSpec(Settings(ScheduleChoice(schedule, schedule)), ParallelSizes(2, 2), stock=stock, flags=FLAGS)
        why = refusal(spec, plan(Request(schedule, 2, 4)), machine_of(spec))
        return [why] if why else []

    flags = {
        "--fp4-quantizer-factory": "fp4_quantizer_factory",
        "--te-precision-config-file": "te_precision_config_file",
        "--use-transformer-engine-op-fuser": "use_transformer_engine_op_fuser",
        "--overlap-dispatch-backward-with-experts-wgrad": "overlap_dispatch_backward_with_experts_wgrad",
    }
    assert refusals("zb-1p") == refusals("1f1b") == refusals("zb-1p", "fp8_param_gather", "fp4_param_gather") == []
    for name, given in flags.items():
        (why,) = refusals("zb-1p", given)
        assert f"does not work with {name}:" in why
        assert refusals("1f1b", given) == []
        assert refusals("zb-1p", given, transformer_impl="local") == []
    fused = "use_transformer_engine_op_fuser", "num_experts"
    assert refusals("zb-1p", *fused) == []
    for grouped in ("moe_single_grouped_weight", "moe_single_grouped_bias"):
        (why,) = refusals("zb-1p", *fused, grouped)
        assert "grouped weights of fused experts were not tried" in why
        assert refusals("1f1b", *fused, grouped) == []
    for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8"):
        assert refusals("zb-1p", "fp8", fp8_recipe=recipe) == []
    made = plan(Request("zb-1p", 2, 4))
    backwards = (Kind.I, Kind.W)
    swapped = tuple(
        tuple(each._replace(microbatch=each.microbatch ^ 1) if each.kind in backwards else each for each in row)
        for row in made.order
    )
    stock = StockFlags(frozenset(["fp8"]), "transformer_engine", fp8_recipe="delayed")
    spec = JobSpec(Settings(ScheduleChoice("file", "file")), ParallelSizes(2, 2), stock=stock, flags=FLAGS)
    recomputing = replace(spec, recompute=StockRecompute("full"))
    assert refusal(recomputing, made) == refusal(spec, replace(made, order=swapped)) == ""
    why = refusal(recomputing, replace(made, order=swapped))
    assert why.startswith("does not work with --fp8-recipe delayed and --recompute-granularity: Transformer Engine")
    (why,) = refusals("zb-1p", "fp8", fp8_recipe="custom")
    assert "does not work with --fp8-recipe custom: use one of tensorwise, delayed, blockwise, mxfp8" in why
    (why,) = refusals("zb-1p", transformer_impl="inference_optimized")
    assert "only the local ones and Transformer Engine's can be split; use --transformer-impl local" in why
    graphs = replace(StockFlags(frozenset(["cuda_graph_impl"]), "transformer_engine"), cuda_graphs="transformer_engine")
    graphed = replace(spec, stock=graphs)
    assert refusal(graphed, made, machine_of(graphed)) == ""
    with mock.patch.object(sys.modules["transformer_engine"], "__version__", "2.9.0"):
        why = refusal(graphed, made, machine_of(graphed))
    assert "Transformer Engine 2.9.0 has no CUDA graphs of weight gradients, as 2.16 and later do" in why
    engine: Any = sys.modules["transformer_engine.pytorch"]
    with mock.patch.object(engine.Linear, "__init__", lambda self: None):
        (why,) = refusals("zb-1p")
    assert f"Transformer Engine {VERSIONS[-1]} has no Linear that can delay weight gradients, as 2.3 and later" in why
    with mock.patch.dict(sys.modules, {"transformer_engine": None}):
        (why,) = refusals("zb-1p")
    assert why.endswith("Transformer Engine needs a GPU; use --transformer-impl local"), "for no schedule"


CHECKS = (
    grouped_linears,
    the_idle_expert_gets_zeros,
    grouped_memory_to_be_filled_is_not_held,
    grouped_tensors_are_counted_and_watched,
    linears_that_share_a_weight,
    grouped_linears_that_share_some_weights,
    biases_handed_on,
    hooks_fire_in_w,
    frozen_parameters,
    nothing_below_needs_a_gradient,
    used_several_times,
    a_whole_backward_of_the_first_microbatch_adds_to_the_others,
    a_backward_of_user_code_runs_a_fused_weights_hooks,
    zeros_are_added_where_that_is_asked_for,
    recomputed_once,
    evaluation_and_whole_backwards_are_untouched,
    a_module_is_itself_after_its_forward,
    bound_again_to_a_newer_store,
    the_binding_of_a_model_splits_them_where_stocks_backward_will_not_do,
    kept_whole,
    what_changes_between_microbatches_counts,
    a_bias_trained_from_the_second_microbatch_on_gets_its_gradient,
    weights_replaced_for_a_run_within_a_forward,
    the_first_microbatch_is_still_one_for_caches_of_quantised_weights,
    memory_is_flat,
    a_gradient_that_was_not_delayed_is_no_secret,
    a_gradient_that_later_was_not_delayed_is_no_secret,
    a_backward_that_reads_its_settings_elsewhere_is_no_secret,
    an_instance_of_another_make,
    what_cannot_be_split_is_refused,
)


def _all_checks() -> dict[str, str]:
    return helpers.failures_of(CHECKS)


@pytest.fixture(scope="module")
def failures(te: Megatron) -> dict[str, str]:
    """What went wrong, by check; all in one process, whose start takes longest."""
    found: dict[str, str] = te("in_groups", 1, _all_checks)[0]
    return found


@pytest.mark.job
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_check(check: str, failures: dict[str, str]):
    assert check not in failures, failures[check]
