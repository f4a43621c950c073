"""Microbatches that differ in their rows and in their length: losses and gradients against stock Megatron's own."""

from __future__ import annotations

from itertools import product

import pytest

from tests.integration.features import SCHEDULES
from tests.integration.test_same_result import assert_same_losses, differing, under
from tests.tiers import some_by_night

# Stock's configuration refuses the default dispatcher beside variable lengths, of a dense model too.
ACCEPTED = ("--moe-token-dispatcher-type", "alltoall")
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PARALLEL = {"PP2": (2, 2, ""), "PP4": (4, 4, ""), "PP2 TP2 sequence parallel": (4, 2, TENSOR)}
CASES = [
    ("PP4", "v-half"),
    ("PP4", "adaptive"),
    ("PP2", "interleaved-1f1b"),
    ("PP2 TP2 sequence parallel", "zb-1p"),
]


@pytest.mark.job
@pytest.mark.feature("variable sequence lengths")
@pytest.mark.parametrize(
    ("parallel", "schedule"),
    some_by_night(dict.fromkeys([*CASES, *product(["PP4"], SCHEDULES)]), lambda *case: case != CASES[-1]),
)
def test_same_losses_and_gradients_to_the_bit(train, parallel, schedule):
    world, size, flags = PARALLEL[parallel]
    job = ("--train-iters", "2", "--micro-batch-size", "2", "--global-batch-size", "14", *flags.split())
    job += ("--pipeline-model-parallel-size", str(size), *ACCEPTED)
    ours, stock = train(world, *job, *under(schedule), samples="varied"), train.stock(world, *job, samples="varied")
    assert len(stock.shapes[0]) >= 4 and {rows for rows, _ in stock.shapes[0]} == {1, 2}
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
