"""A job as data: what its sizes come to."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import Recompute
from megatron.schedules.estimate.model_build import StockRecompute, recomputed_share
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.estimate.shape import Experts, Latent, Shape
from megatron.schedules.estimate.symbols import layer_flops, share, works


def test_an_optimizers_state_is_shared_by_replicas_and_of_experts_by_theirs():
    sizes = ParallelSizes(64, pipeline=4, tensor=2, expert=4, expert_tensor=1, has_experts=True)
    assert sizes.optimizer_shared_by == (1, 1)
    distributed = ParallelSizes(64, 4, 2, expert=4, has_experts=True, optimizer_instances=2)
    assert distributed.optimizer_shared_by == (4, 2)


def test_the_least_world_has_a_place_for_every_expert():
    assert ParallelSizes(0, pipeline=4, tensor=2, context=3).least_world == 24
    assert ParallelSizes(0, pipeline=4, tensor=2, expert=8, expert_tensor=2, has_experts=True).least_world == 64
    assert ParallelSizes(0, pipeline=4, tensor=2, expert=8, expert_tensor=2).least_world == 8


def test_recompute_of_a_module_repeats_its_own_products_only():
    shape = Shape(("+-",), 64, 4, 128, 0, inner=256, latent=Latent(24, 16, 12, 4, 10), experts=Experts(32, 2, 8))
    build = Build(shape, head=16, experts=8)
    up = 2 * (24 * 4 * 16 + 16 * 4 * (12 + 10))
    for symbols in ("+-", "+E"):
        parts, flops = works(build, symbols), layer_flops(build, symbols)
        assert share(parts, "mla_up_proj") == up / flops
        linears = sum(each.flops for each in parts[1].linears) / flops
        assert (share(parts, "mlp"), share(parts, "moe")) == ((linears, 0) if "-" in symbols else (0, linears))


def test_megatrons_recompute_repeats_its_share_of_the_forward():
    build = MODELS["9.6B"].whole
    parts = works(build, "*-")

    def again(*flags: Any, **named: Any) -> float:
        return recomputed_share(StockRecompute(*flags, **named).kept, build)

    assert again() == 0
    assert again("full", "uniform", 1) == 1
    assert again("full", "block", 1) == 1
    assert again("selective") == share(parts, "core_attn") > 0
    both = share(parts, "core_attn") + share(parts, "mlp")
    assert again("selective", modules=("core_attn", "mlp", "nobody knows")) == both
    assert StockRecompute("full", "block", 3).kept == Recompute(layers=3)
    assert StockRecompute("selective").kept == Recompute(modules=("core_attn",))
