"""A vocabulary cut over all pipeline ranks: the losses and gradients of stock's own run, whatever else is on."""

from __future__ import annotations

import shlex

import pytest
import torch

from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.results import Result
from tests.integration.test_same_result import assert_same_losses, differing, under

SHARED = "--pipeline-vocabulary-parallel"


def shared(schedule: str) -> tuple[str, ...]:
    return (*under(schedule), SHARED)


def off(ours: dict[tuple[str, int, int], torch.Tensor], stock: dict[tuple[str, int, int], torch.Tensor]) -> float:
    """What is farthest off in any parameter, against the largest number of the same."""
    assert ours.keys() == stock.keys()
    return max(float((ours[key] - value).abs().max() / value.abs().max()) for key, value in stock.items() if value.any())


def assert_same(ours: Result, stock: Result) -> None:
    assert_same_losses(ours, stock)
    assert off(ours.gradients, stock.gradients) < 1e-5


TENSOR = "--tensor-model-parallel-size 2"
# Ranks, pipeline ranks, flags of the job, flags of the model, whether embeddings are tied.
SETTINGS = {
    "two ranks": (2, 2, "", "", False),
    "four ranks": (4, 4, "", "", False),
    "tied": (2, 2, "", "", True),
    "tied, four ranks, data parallel": (8, 4, "", "", True),
    "tensor parallel": (4, 2, TENSOR, "", False),
    "sequence parallel": (4, 2, f"{TENSOR} --sequence-parallel", "", False),
    "sequence parallel, rope": (4, 2, f"{TENSOR} --sequence-parallel", MODERN, False),
    "sequence parallel, tied, rope": (4, 2, f"{TENSOR} --sequence-parallel", MODERN, True),
    "experts": (4, 2, f"{TENSOR} --sequence-parallel", f"{MODERN} {MOE_ALLTOALL}", False),
    "loss per token": (4, 2, "--calculate-per-token-loss", "", False),
    "clipping": (2, 2, "--clip-grad 0.1", "", False),
    "clipping, tied": (2, 2, "--clip-grad 0.1", "", True),
    "overlapped reduction": (4, 2, "--overlap-grad-reduce", "", False),
    "overlapped reduction, tied": (4, 2, "--overlap-grad-reduce", "", True),
    "microbatches of two": (2, 2, "--micro-batch-size 2", "", False),
    "full recompute": (
        2,
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "",
        False,
    ),
}
USUAL = {("two ranks", "1f1b"), ("tied", "v-half"), ("sequence parallel", "v-half"), ("four ranks", "v-half")}
SCHEDULES = ("1f1b", "zb-1p", "v-half", "interleaved-1f1b", "adaptive")


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        pytest.param(setting, schedule, marks=() if (setting, schedule) in USUAL else pytest.mark.full_matrix)
        for setting in SETTINGS
        for schedule in SCHEDULES
    ],
)
def test_losses_and_gradients_are_stocks(train, setting, schedule):
    world, size, flags, model, tied = SETTINGS[setting]
    job = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", str(size))
    job += tuple(shlex.split(flags))
    how = {"model": tuple(shlex.split(model)), "tied": tied}
    assert_same(train(world, *job, *shared(schedule), **how), train.stock(world, *job, **how))


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "1f1b"])
@pytest.mark.full_matrix
def test_schedules_are_equal_to_the_bit(train, schedule):
    job = ("--train-iters", "3", "--global-batch-size", "6", "--pipeline-model-parallel-size", "2")
    one, other = train(2, *job, *shared("1f1b")), train(2, *job, *shared(schedule))
    assert differing(other, one) == []
    assert other.losses == one.losses
