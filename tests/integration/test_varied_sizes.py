"""Microbatches that differ in their rows and in their length: losses and gradients against stock Megatron's own."""

from __future__ import annotations

import pytest

from tests.integration.test_same_result import assert_same_losses, differing, under

SCHEDULES = ("zb-1p", "v-min", "v-half", "v-zb", "interleaved-1f1b", "adaptive")
# Stock's configuration refuses the default dispatcher beside variable lengths, of a dense model too.
ACCEPTED = ("--moe-token-dispatcher-type", "alltoall")
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PARALLEL = {"PP2": (2, 2, ""), "PP4": (4, 4, ""), "PP2 TP2 sequence parallel": (4, 2, TENSOR)}
CASES = [*((name, "PP4") for name in SCHEDULES), ("v-half", "PP2"), ("zb-1p", "PP2 TP2 sequence parallel")]


@pytest.mark.parametrize(("schedule", "parallel"), CASES)
def test_same_losses_and_gradients_to_the_bit(train, schedule, parallel):
    world, size, flags = PARALLEL[parallel]
    job = ("--train-iters", "2", "--micro-batch-size", "2", "--global-batch-size", "14", *flags.split())
    job += ("--pipeline-model-parallel-size", str(size), *ACCEPTED)
    ours, stock = train(world, *job, *under(schedule), samples="varied"), train.stock(world, *job, samples="varied")
    assert len(stock.shapes[0]) >= 4 and {rows for rows, _ in stock.shapes[0]} == {1, 2}
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
