"""What stages send is as wide as the model makes it."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Training
from tests.integration.features import each_schedule
from tests.integration.test_same_result import assert_same_losses, differing, under

JOB = "--train-iters 3 --global-batch-size 4".split()


@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_several_residual_streams_go_from_stage_to_stage(train: Training, schedule: str) -> None:
    """Stock's messages are one stream wide, so it runs without a pipeline."""
    ours = train(2, *JOB, "--pipeline-model-parallel-size", "2", *under(schedule), streams=True)
    stock = train.stock(1, *JOB, streams=True)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
    assert stock.losses != train.stock(1, *JOB).losses
