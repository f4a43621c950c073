"""Frozen parameters: whatever is not trained has no weight gradient, and what is trained has stock's."""

from __future__ import annotations

import pytest
import torch

from tests.integration.conftest import Training
from tests.integration.features import each_schedule
from tests.integration.test_same_result import assert_same_losses, differing, under

JOB = "--train-iters 3 --global-batch-size 8 --pipeline-model-parallel-size 2".split()
# The adapters are not in the checkpoint that all start from.
JOB += "--dist-ckpt-strictness ignore_all --lr 1e-2".split()


@pytest.mark.nightly
@pytest.mark.feature("LoRA: frozen model, low-rank adapters")
@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_low_rank_adapters(train: Training, schedule: str) -> None:
    """Adapters learn, and nothing else. The first stage's input needs no gradient: the embedding is frozen too."""
    ours, stock = train(4, *JOB, *under(schedule), adapters=True), train.stock(4, *JOB, adapters=True)
    assert_same_losses(ours, stock)
    # Samples differ more from each other than what three iterations learn: the same ones are compared.
    untrained = train.stock(4, *JOB, "--lr", "0", "--min-lr", "0", adapters=True)
    assert stock.losses[-1] < untrained.losses[-1] - 0.01
    for name, start in untrained.weights.items():
        assert torch.equal(ours.weights[name], start) == ("adapter" not in name[0])
    assert all("adapter" in name for name, _, _ in ours.gradients)
    assert differing(ours, stock) == []


def test_a_first_stage_with_nothing_to_train(train: Training) -> None:
    """It holds the embedding alone, frozen: no gradient goes back through it."""
    layout = ("--pipeline-model-parallel-layout", "E|ttt|ttt|ttL")
    ours, stock = train(4, *JOB, *layout, *under("v-half"), adapters=True), train.stock(4, *JOB, adapters=True)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
