"""Mixtures of experts, their experts spread over ranks: losses and gradients against stock Megatron's own."""

from __future__ import annotations

import pytest
import torch

from tests.integration.conftest import Training
from tests.integration.features import FULL, MOE, each_setting
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under
from tests.integration.test_with_plain_attention import MLA

JOB = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *CLIP_NOTHING)
EXPERTS = f"--moe-token-dispatcher-type alltoall --swiglu --disable-bias-linear {MOE}"
GATHERED = f"{EXPERTS.replace('alltoall', 'allgather')} --moe-z-loss-coeff 1e-3"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SPARSE = "--moe-layer-freq ([0,1]*4) --moe-ffn-hidden-size 64"

# Each: the number of ranks, the flags that say what parameters there are, the other flags.
SETTINGS = {
    "expert parallel 2": (4, EXPERTS, EP2),
    "expert parallel 2, allgather, z-loss, loss per token": (4, GATHERED, f"{EP2} --calculate-per-token-loss"),
    "expert parallel 2 over tensor ranks, shared expert": (4, SHARED, f"{EP2} {TP2}"),
    "expert parallel 2, shared expert, distributed optimizer, overlapped": (4, SHARED, f"{EP2} {OVERLAPPED}"),
    "expert parallel 2, shared expert, full recompute": (4, SHARED, f"{EP2} {FULL} uniform --recompute-num-layers 1"),
    "experts in every second layer": (2, f"{EXPERTS} {SPARSE}", ""),
    "expert bias, multi-latent attention, shared expert": (4, f"{SHARED} {BIAS} {MLA}", EP2),
}
USUAL = {
    "expert parallel 2, allgather, z-loss, loss per token": ("zb-1p",),
    "expert parallel 2, shared expert, distributed optimizer, overlapped": ("v-half", "interleaved-1f1b"),
    "experts in every second layer": ("v-zb",),
    "expert bias, multi-latent attention, shared expert": ("adaptive",),
}


@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, USUAL))
def test_the_result_is_stocks(train: Training, setting: str, schedule: str) -> None:
    """To the bit, weights after two steps too; a distributed optimizer leaves no whole gradients to compare."""
    world, model, flags = SETTINGS[setting]
    job, attention = (*JOB, *flags.split()), "plain" if MLA in model else "stock"
    ours = train(world, *job, *under(schedule), model=tuple(model.split()), attention=attention)
    stock = train.stock(world, *job, model=tuple(model.split()), attention=attention)
    assert_same_losses(ours, stock)
    assert "--use-distributed-optimizer" in job or differing(ours, stock) == []
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []
