"""Samples of several documents that must not see each other: their bounds reach the attention of every stage."""

from __future__ import annotations

import pytest

from tests.integration.test_same_result import assert_same_losses, differing, under

JOB = ("--train-iters", "2", "--global-batch-size", "4", "--dataloader-inter-document-masking")
PIPELINE = ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_the_bounds_of_a_sample_end_where_the_sample_does(megatron):
    bounds = [0, 3, 7, 16]
    assert megatron("packed_sequences", bounds, 16) == (bounds, bounds, 9, 9)
    assert megatron("packed_sequences", [0, 16], 16) == ([0, 16], [0, 16], 16, 16)


@pytest.mark.parametrize("schedule", ["zb-1p", "v-half"])
def test_every_rank_sees_the_bounds_and_results_are_stocks(train, schedule):
    one = train.stock(1, *JOB, samples="packed")
    ours, stock = (
        train(4, *JOB, *PIPELINE, *under(schedule), samples="packed"),
        train.stock(4, *JOB, *PIPELINE, samples="packed"),
    )
    assert max(map(len, one.shapes[0])) > 3
    assert ours.shapes == stock.shapes == one.shapes * 4
    assert_same_losses(ours, one)
    assert differing(ours, stock) == []
