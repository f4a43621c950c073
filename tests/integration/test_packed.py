"""Samples of several documents or conversations, apart from each other: attention on every stage gets their bounds."""

from __future__ import annotations

import pytest
import torch

from tests import tolerances
from tests.integration.features import each_setting
from tests.integration.test_same_result import assert_same_losses, differing, under

JOB = ("--train-iters", "2", "--global-batch-size", "4")
SETTINGS = {
    "packed documents": ("packed", ("--dataloader-inter-document-masking",)),
    "packed conversations (--sft)": ("conversations", ("--sft", "--data-path", "any", "--split", "80,10,10")),
}
USUAL = {"packed conversations (--sft)": ("v-half",)}
PIPELINE = ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_the_bounds_of_a_sample_end_where_the_sample_does(megatron):
    bounds = [0, 3, 7, 16]
    assert megatron("packed_sequences", bounds, 16) == (bounds, bounds, 9, 9)
    assert megatron("packed_sequences", [0, 16], 16) == ([0, 16], [0, 16], 16, 16)


@pytest.mark.nightly
@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, USUAL))
def test_every_rank_sees_the_bounds_and_results_are_stocks(train, setting, schedule):
    samples, flags = SETTINGS[setting]
    job = (*JOB, *flags)
    one, stock = train.stock(1, *job, samples=samples), train.stock(4, *job, *PIPELINE, samples=samples)
    ours = train(4, *job, *PIPELINE, *under(schedule), samples=samples)
    assert max(map(len, one.shapes[0])) > 3
    assert ours.shapes == stock.shapes == one.shapes * 4
    assert ours.losses == stock.losses and ours.evaluations == stock.evaluations
    if all(weight.dtype is torch.float32 for weight in one.weights.values()):
        assert_same_losses(ours, one)
    else:
        assert ours.losses == pytest.approx(one.losses, abs=tolerances.FEWER_BITS)
    assert differing(ours, stock) == []
