"""Mixtures of experts, their experts spread over ranks: losses and gradients against stock Megatron's own."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.integration.conftest import Training
from tests.integration.features import FULL, MOE, each_setting
from tests.integration.results import MODEL
from tests.integration.server import Megatron
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under
from tests.integration.test_with_plain_attention import MLA

HIDDEN = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
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


# Messages of experts hidden behind weight gradients: the number of ranks, the model, the other flags.
HIDING = {
    "expert parallel 2, hidden messages": (4, EXPERTS, EP2),
    "expert parallel 2 over tensor ranks, shared expert, hidden messages": (4, SHARED, f"{EP2} {TP2}"),
    "expert parallel 2, distributed optimizer, overlapped, hidden messages": (4, SHARED, f"{EP2} {OVERLAPPED}"),
    "expert parallel 2, full recompute, hidden messages": (4, SHARED, f"{EP2} {FULL} uniform --recompute-num-layers 1"),
}
SPLITTING = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive")
HIDING_USUAL = {
    "expert parallel 2, hidden messages": "v-half",
    "expert parallel 2 over tensor ranks, shared expert, hidden messages": "zb-1p",
    "expert parallel 2, distributed optimizer, overlapped, hidden messages": "v-zb",
}


@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, USUAL))
def test_the_result_is_stocks(train: Training, setting: str, schedule: str) -> None:
    """To the bit, weights after two steps too; a distributed optimizer leaves no whole gradients to compare."""
    world, model, flags = SETTINGS[setting]
    assert_stocks(train, world, model, flags, schedule)


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        pytest.param(
            *case,
            marks=pytest.mark.feature("hidden messages of experts")
            if HIDING_USUAL.get(case[0]) == case[1]
            else pytest.mark.full_matrix,
        )
        for case in product(HIDING, SPLITTING)
    ],
)
def test_hidden_messages_change_no_result(train: Training, setting: str, schedule: str) -> None:
    world, model, flags = HIDING[setting]
    assert_stocks(train, world, model, flags, schedule, HIDDEN)


@pytest.mark.parametrize(
    ("model", "flags", "schedule"),
    [
        (EXPERTS, EP2, "v-half"),
        (SHARED, f"{EP2} {TP2}", "zb-1p"),
        pytest.param(SHARED, f"{EP2} {FULL} uniform --recompute-num-layers 1", "zb-1p", marks=pytest.mark.full_matrix),
    ],
)
def test_weight_gradients_run_behind_messages_once_and_in_order(
    megatron: Megatron, model: str, flags: str, schedule: str
) -> None:
    job = [*MODEL, *JOB, *model.split(), *flags.split(), *under(schedule)]
    hidden = megatron("behind_messages", 4, [*job, *HIDDEN.split()])
    plain = megatron("behind_messages", 4, job)
    assert any(rank.added for rank in plain)
    for ours, without in zip(hidden, plain, strict=True):
        assert without.behind == [], "without the flag stock sends its messages itself"
        assert sum(ours.behind) > 8 or not without.added, "the last rank of zb-1p has whole backwards alone"
        # For each parameter the microbatches whose gradients are added, in order.
        assert sorted(ours.added.values()) == sorted(without.added.values())


def assert_stocks(train: Training, world: int, model: str, flags: str, schedule: str, ours_alone: str = "") -> None:
    """The job's losses, gradients and weights are those of stock's to the bit."""
    job, attention = (*JOB, *flags.split()), "plain" if MLA in model else "stock"
    ours = train(world, *job, *ours_alone.split(), *under(schedule), model=tuple(model.split()), attention=attention)
    stock = train.stock(world, *job, model=tuple(model.split()), attention=attention)
    assert_same_losses(ours, stock)
    assert "--use-distributed-optimizer" in job or differing(ours, stock) == []
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []
