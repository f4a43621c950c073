"""A job as data: what its sizes come to."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate.build import Build, Experts, Latent, Shape
from megatron.schedules.estimate.device_memory import Recompute
from megatron.schedules.estimate.model_build import StockRecompute, recomputed_share
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.estimate.work import layer_work


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
    shape = Shape(1, 64, 4, 128, 0, inner=256, latent=Latent(24, 16, 12, 4, 10), experts=Experts((True,), 32, 2, 8))
    dense, experts = (layer_work(Build(shape, head=16, experts=8), experts=each) for each in (False, True))
    up = 2 * (24 * 4 * 16 + 16 * 4 * (12 + 10))
    for work in (dense, experts):
        assert work.share("mla_up_proj") == up / work.flops
        linears = sum(each.flops for each in work.mlp) / work.flops
        assert (work.share("mlp"), work.share("moe")) == ((linears, 0) if work is dense else (0, linears))


def test_megatrons_recompute_repeats_its_share_of_the_forward():
    work = layer_work(MODELS["9.6B"].whole, experts=False)

    def share(*flags: Any, **named: Any) -> float:
        return recomputed_share(StockRecompute(*flags, **named).kept, work)

    assert share() == 0
    assert share("full", "uniform", 1) == 1
    assert share("full", "block", 1) == 1
    assert share("selective") == work.share("core_attn") > 0
    assert share("selective", modules=("core_attn", "mlp", "nobody knows")) == work.share("core_attn") + work.share(
        "mlp"
    )
    assert StockRecompute("full", "block", 3).kept == Recompute(layers=3)
    assert StockRecompute("selective").kept == Recompute(modules=("core_attn",))
