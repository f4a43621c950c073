"""What needs Transformer Engine's attention on a GPU: context parallelism and multi-latent attention, against stock.

Both sides have the same attention in plain torch in its place.
"""

from __future__ import annotations

import pytest
import torch

from tests.integration.conftest import Training
from tests.integration.features import FULL, each_setting
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under

JOB = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
CP2 = "--context-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
GROUPS = "--position-embedding-type rope --no-rope-fusion --group-query-attention --num-query-groups 2"
MLA = """
    --multi-latent-attention --position-embedding-type rope --no-rope-fusion --q-lora-rank 16 --kv-lora-rank 16
    --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --normalization RMSNorm --swiglu
"""

# Each: the number of ranks, the flags that say what parameters there are, the other flags.
SETTINGS = {
    "context parallel 2": (4, "", CP2),
    "context and tensor parallel 2": (8, "", f"{CP2} {TP2}"),
    "context parallel 2, RoPE, query groups, loss per token": (4, GROUPS, f"{CP2} --calculate-per-token-loss"),
    "multi-latent attention": (2, MLA, ""),
    "multi-latent attention, context parallel 2": (4, MLA, CP2),
    "multi-latent attention, tensor and sequence parallel 2": (4, MLA, TP2),
    "multi-latent attention, qk-layernorm": (2, f"{MLA} --qk-layernorm", ""),
    "multi-latent attention, full recompute": (2, MLA, f"{FULL} uniform --recompute-num-layers 1"),
}
USUAL = {
    "context parallel 2": ("v-half",),
}


@pytest.mark.job
@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, USUAL))
def test_the_result_is_stocks(train: Training, setting: str, schedule: str) -> None:
    world, model, flags = SETTINGS[setting]
    job = (*JOB, *flags.split())
    ours = train(world, *job, *under(schedule), model=tuple(model.split()), attention="plain")
    stock = train.stock(world, *job, model=tuple(model.split()), attention="plain")
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


SHARDED = {
    "context parallel 2, distributed optimizer, overlapped": 4,
    "context and data parallel 2, distributed optimizer, overlapped": 8,
}
SHARDED_USUAL = {"context parallel 2, distributed optimizer, overlapped": ("v-half",)}


@pytest.mark.parametrize(("setting", "schedule"), each_setting(SHARDED, SHARDED_USUAL))
def test_distributed_optimizer_over_context_and_data_ranks(train: Training, setting: str, schedule: str) -> None:
    """Each rank holds a shard of the reduced gradients only, so what is compared is the weights they lead to.

    The order in which gloo adds up four ranks depends on where in a bucket a gradient lies, which is as in stock's run
    where the ranks have the same layers. The sum of two ranks has but one order.
    """
    world = SHARDED[setting]
    job = (*JOB, *CP2.split(), "--use-distributed-optimizer", "--overlap-grad-reduce", *CLIP_NOTHING)
    ours = train(world, *job, *under(schedule), attention="plain")
    stock = train.stock(world, *job, attention="plain")
    assert_same_losses(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    if world == 4 or schedule == "zb-1p":
        assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []


def test_context_parallel_ranks_together_are_one(train: Training) -> None:
    """The attention that both sides share is right in a whole job too: stock's own does the same on one rank."""
    assert_same_losses(train.stock(4, *JOB, *CP2.split(), model=(), attention="plain"), train.stock(1, *JOB[:4]))
