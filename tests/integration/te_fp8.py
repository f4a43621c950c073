"""FP8 and FP4 linears of Transformer Engine by themselves, whole and split, and what their W holds: in forked ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.fp4_utils import quantize_nvfp4_param_shard
from megatron.core.fp8_utils import post_all_gather_processing, quantize_param_shard
from torch import Tensor
from transformer_engine.common import recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor

from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration import split_helpers as helpers
from tests.integration.te_itself import LAST_W_FIRST
from tests.runtime.late_copies import LateCopies
from tests.support import te_quantized

WIDTH, SEQUENCE, BATCH = 128, 32, 8
TOKENS = SEQUENCE * BATCH
ORDERS = (helpers.SEVERAL_I_AHEAD, LAST_W_FIRST)


class Recipe(NamedTuple):
    """How numbers are quantized, and the compute capability of the GPU that does so."""

    make: Callable[[], Any]
    capability: str


RECIPES = {
    "tensorwise": Recipe(lambda: recipe.Float8CurrentScaling(), "9.0"),
    "tensorwise on Blackwell": Recipe(lambda: recipe.Float8CurrentScaling(), "10.0"),
    "delayed": Recipe(lambda: recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max"), "9.0"),
    "blockwise": Recipe(lambda: recipe.Float8BlockScaling(), "9.0"),
    "mxfp8": Recipe(lambda: recipe.MXFP8BlockScaling(), "10.0"),
    # Rounds gradients at random, in the backward.
    "nvfp4": Recipe(lambda: recipe.NVFP4BlockScaling(), "10.0"),
}


class _Experts(torch.nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = te.GroupedLinear(2, WIDTH, WIDTH, **settings)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        output: Tensor = self.linear(x.reshape(-1, WIDTH), [TOKENS // 2] * 2, is_first_microbatch=is_first_microbatch)
        return output


class _Pair(torch.nn.Module):
    """A normed column parallel linear and a row parallel one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        group = parallel_state.get_tensor_model_parallel_group()
        self.sequence_parallel = settings.pop("sequence_parallel", False)
        common = settings | {"tp_group": group, "tp_size": group.size(), "sequence_parallel": self.sequence_parallel}
        self.up = te.LayerNormLinear(WIDTH, 2 * WIDTH, parallel_mode="column", **common)
        self.down = te.Linear(2 * WIDTH, WIDTH, parallel_mode="row", **common)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(x, is_first_microbatch=is_first_microbatch))
        output: Tensor = x + self.down(hidden, is_first_microbatch=is_first_microbatch)
        return output


KINDS: dict[str, tuple[Callable[..., torch.nn.Module], int]] = {
    "Linear": (lambda **settings: te.Linear(WIDTH, WIDTH, **settings), 1),
    # Adds its bias after the product.
    "Linear, row parallel": (lambda **settings: te.Linear(WIDTH, WIDTH, parallel_mode="row", **settings), 1),
    "LayerNormLinear": (lambda **settings: te.LayerNormLinear(WIDTH, WIDTH, **settings), 1),
    "GroupedLinear": (_Experts, 1),
}


def forward_of(model: torch.nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """A forward in FP8 whose first call is that of the first microbatch."""
    first = itertools.chain([True], itertools.repeat(False))

    def forward(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name].make()):
            output: Tensor = model(x, is_first_microbatch=next(first))
        return output

    return forward


def inputs(count: int, part: int = 0, parts: int = 1) -> list[Tensor]:
    """Of ``count`` microbatches, the ``part`` of the sequence."""
    drawn = torch.randn(count, SEQUENCE, BATCH, WIDTH, generator=torch.Generator().manual_seed(5))
    return [x.chunk(parts)[part].bfloat16().requires_grad_() for x in drawn]


def _primary(name: str) -> AbstractContextManager[None]:
    """Modules built inside store their weights as the recipe quantizes them, and no others."""
    made: AbstractContextManager[None] = te.fp8_model_init(enabled=True, recipe=RECIPES[name].make())
    return made


def _models(build: Callable[..., Any], fused: bool, primary: str = "", **more: Any) -> Iterator[tuple[Any, Any]]:
    """Two of the same weights, and what fires when their gradients are there."""
    torch.manual_seed(1)
    with _primary(primary) if primary else nullcontext():
        whole = build(params_dtype=torch.bfloat16, device="cpu", fuse_wgrad_accumulation=fused, **more)
    for model in (whole, copy.deepcopy(whole)):
        FP8GlobalStateManager.reset()
        torch.manual_seed(2)
        yield model, helpers.MainGrads(model, torch.float32)


def compare(
    build: Callable[..., Any],
    splits: int,
    name: str,
    *,
    fused: bool,
    order: str,
    part: int = 0,
    parts: int = 1,
    **more: Any,
) -> None:
    """Outputs, gradients of inputs and of weights are those of the whole backward, to the bit."""
    found = []
    for (model, hooks), split in zip(_models(build, fused, **more), (False, True), strict=True):
        xs, forward = inputs(order.count("F"), part, parts), forward_of(model, name)
        if split:
            store = WeightGradients()
            assert split_te_linears(model, store) == splits
            outputs = helpers.split(forward, xs, store, order)
        else:
            outputs = helpers.stock(forward, xs)
        found.append(
            (outputs, [x.grad for x in xs], {n: p.main_grad for n, p in model.named_parameters()}, hooks.fired)
        )
    (outputs, inputs_, gradients, fired), (our_outputs, our_inputs, our_gradients, our_fired) = found
    helpers.assert_same("output", our_outputs, outputs)
    helpers.assert_same("input gradient", our_inputs, inputs_)
    for name_, gradient in gradients.items():
        assert gradient.abs().sum() > 0, f"{name_} has no gradient to compare"
        helpers.assert_same(name_, [our_gradients[name_]], [gradient])
    assert our_fired == fired


def every_kind(name: str, primary: bool = False) -> int:
    """All kinds of module, fused or not, in two orders; returns the number of cases."""
    cases = list(itertools.product(KINDS, (False, True), ORDERS))
    for kind, fused, order in cases:
        compare(*KINDS[kind], name, fused=fused, order=order, primary=name if primary else "")
    return len(cases)


def main_weights_quantized(name: str) -> None:
    """Two ranks write their parts of weights as the distributed optimizer has them write.

    The parts end within blocks, and one rank has nothing of the second weight. After the gather both weights have the
    numbers of the whole main weights, quantized at once, by rows and by columns.
    """
    rank, size = torch.distributed.get_rank(), WIDTH * 3 * WIDTH
    with _primary(name):
        weights = [
            te.Linear(WIDTH, 3 * WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu").weight for _ in "ab"
        ]
    mains = list(torch.randn(2, 3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) * 0.02)
    bounds = [((0, 1000), (1000, size))[rank], ((0, 0), (0, size))[rank]]
    for weight in weights:
        if name == "delayed":
            weight._quantizer.scale.fill_(1024.0)
    shards = [main.view(-1)[a:b] if b > a else None for main, (a, b) in zip(mains, bounds, strict=True)]
    offsets = [a if b > a else None for a, b in bounds]
    quantize = quantize_nvfp4_param_shard if name == "nvfp4" else quantize_param_shard
    quantize(weights, shards, offsets, torch.distributed.group.WORLD)
    for weight, main, (a, b) in zip(weights, mains, bounds, strict=True):
        data = (weight._data if hasattr(weight, "_data") else weight._rowwise_data).view(-1)
        parts: list[Any] = [None, None]
        in_a_byte = size // data.numel()
        torch.distributed.all_gather_object(parts, data[a // in_a_byte : b // in_a_byte].clone())
        data.copy_(torch.cat(parts))
        post_all_gather_processing([weight])
        weight.update_usage(columnwise_usage=True)
        whole = weight._quantizer.copy()(main.bfloat16())
        for columnwise in (False, True):
            assert torch.equal(te_quantized.matrix(weight, columnwise), te_quantized.matrix(whole, columnwise))


def tensor_parallel(name: str, sequence_parallel: bool) -> None:
    """A column and a row parallel linear."""
    rank, size = (torch.distributed.get_rank(), 2) if sequence_parallel else (0, 1)
    for fused, order in itertools.product((False, True), ORDERS):
        compare(_Pair, 2, name, fused=fused, order=order, part=rank, parts=size, sequence_parallel=sequence_parallel)


def held_for_w(name: str, primary: bool = False) -> int:
    """Bytes that a linear without a bias holds from I to W."""
    with _primary(name) if primary else nullcontext():
        model = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu")
    assert isinstance(model.weight, QuantizedTensor) == primary
    return _held(model, name, *inputs(1))


def held_under_sequence_parallelism(name: str) -> int:
    """Bytes that a column and a row parallel linear hold from I to W, where the latter's product is computed in I."""
    settings = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu", "fuse_wgrad_accumulation": True}
    model = _Pair(sequence_parallel=True, **settings)
    helpers.MainGrads(model, torch.float32)
    return _held(model, name, *inputs(1, torch.distributed.get_rank(), 2))


def _held(model: torch.nn.Module, name: str, x: Tensor) -> int:
    meter = ActivationMeter(model.parameters())
    store = WeightGradients(meter)
    split_te_linears(model, store)
    with store.input_gradient(0, 0):
        helpers.loss(forward_of(model, name)(x)).backward()
    held = meter.current
    store.run(0, 0)
    assert meter.current == 0
    return held


def offloaded(name: str) -> list[int]:
    """Bytes of each storage of a linear's forward that goes to the host; gradients are those of one that stays."""
    found: list[list[Tensor | None]] = []
    for moved in (False, True):
        torch.manual_seed(1)
        FP8GlobalStateManager.reset()
        model = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu")
        copies, store, (x,) = LateCopies(), WeightGradients(hooked=True), inputs(1)
        offloads, hooks = Offloads(copies), helpers.MainGrads(model, torch.float32)
        split_te_linears(model, store)
        forward = forward_of(model, name)
        with store.input_gradient(0, 0):
            if moved:
                with offloads.forward(0, 0), offloads.saving():
                    y = forward(x)
                for step in (offloads.offload, offloads.load, offloads.arrive):
                    step(0, 0)
            else:
                y = forward(x)
            helpers.loss(y).backward()
        store.run(0, 0)
        assert hooks.fired == {"weight": 1}
        found.append([y.detach(), x.grad, model.weight.main_grad])
    helpers.assert_same("tensor", found[1], found[0])
    return [size for way, sizes in copies.moved for size in sizes if way == "out"]
