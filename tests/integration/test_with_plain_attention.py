"""What needs Transformer Engine's attention on a GPU: context parallelism and multi-latent attention, against stock.

Both sides have the same attention in plain torch in its place.
"""

from __future__ import annotations

import pytest
import torch

from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under

SIX = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive", "interleaved-1f1b")
JOB = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
CP2 = "--context-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MLA = """
    --multi-latent-attention --position-embedding-type rope --no-rope-fusion --q-lora-rank 16 --kv-lora-rank 16
    --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --normalization RMSNorm --swiglu
"""

# Each: the number of ranks and the flags. The schedules it is tried with in any run stand below.
SETTINGS = {
    "CP2": (4, CP2),
    "CP2 TP2": (8, f"{CP2} {TP2}"),
    "CP2 per token": (4, f"{CP2} --calculate-per-token-loss"),
    "CP2 rope GQA": (
        4,
        f"{CP2} --position-embedding-type rope --no-rope-fusion --group-query-attention --num-query-groups 2",
    ),
    "MLA": (2, MLA),
    "MLA CP2": (4, f"{MLA} {CP2}"),
    "MLA TP2": (4, f"{MLA} {TP2}"),
    "MLA norms of queries and keys": (2, f"{MLA} --qk-layernorm"),
    "MLA recomputed": (2, f"{MLA} {RECOMPUTED}"),
}
CHOSEN = {
    ("CP2", "v-half"),
    ("CP2", "adaptive"),
    ("CP2 TP2", "zb-1p"),
    ("CP2 per token", "v-min"),
    ("CP2 rope GQA", "interleaved-1f1b"),
    ("MLA", "v-zb"),
    ("MLA CP2", "v-half"),
    ("MLA TP2", "v-min"),
    ("MLA norms of queries and keys", "zb-1p"),
    ("MLA recomputed", "adaptive"),
}


@pytest.mark.parametrize("schedule", SIX)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_result_is_stocks(train, full_matrix, setting, schedule):
    if not full_matrix and (setting, schedule) not in CHOSEN:
        pytest.skip("only with --full-matrix")
    world, flags = SETTINGS[setting]
    ours = train(world, *JOB, *flags.split(), *under(schedule), attention="plain")
    stock = train.stock(world, *JOB, *flags.split(), attention="plain")
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize("world", [4, 8], ids=["CP2", "CP2 DP2"])
@pytest.mark.parametrize("schedule", SIX)
def test_distributed_optimizer_over_context_and_data_ranks(train, full_matrix, schedule, world):
    """Each rank holds a shard of the reduced gradients only, so what is compared is the weights they lead to.

    The order in which gloo adds up four ranks depends on where in a bucket a gradient lies, which is as in stock's run
    where the ranks have the same layers. The sum of two ranks has but one order.
    """
    if not full_matrix and (schedule, world) not in (("v-zb", 4), ("zb-1p", 8)):
        pytest.skip("only with --full-matrix")
    job = (*JOB, *CP2.split(), "--use-distributed-optimizer", "--overlap-grad-reduce", *CLIP_NOTHING)
    ours = train(world, *job, *under(schedule), attention="plain")
    stock = train.stock(world, *job, attention="plain")
    assert_same_losses(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    if world == 4 or schedule == "zb-1p":
        assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []


def test_context_parallel_ranks_together_are_one(train):
    """And so the attention that both sides share is right in a whole job too."""
    ours = train(4, *JOB, *CP2.split(), *under("v-half"), attention="plain")
    assert_same_losses(ours, train.stock(1, *JOB[:4]))
