"""``--pipeline-layers auto``, and costs that come from the model: stock's losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.results import MODEL
from tests.integration.test_same_result import assert_same_losses, differing, under
from tests.measure.custom import stage, written
from tests.tiers import by_night

AUTO = ("--pipeline-layers", "auto")


@pytest.mark.job
@pytest.mark.parametrize("schedule", [by_night("zb-1p"), "v-half", by_night("adaptive")])
def test_any_number_of_layers_trains_to_stocks_losses(train, schedule):
    """Seven layers, and an output layer of a large vocabulary, over two ranks; stock has them on one."""
    job = ("--train-iters", "3", "--global-batch-size", "4", "--num-layers", "7")
    ours = train(2, *job, "--pipeline-model-parallel-size", "2", *under(schedule, "1"), *AUTO)
    stock = train.stock(1, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def test_layers_given_for_each_stage_train_to_stocks_losses(train):
    job = ("--train-iters", "2", "--global-batch-size", "4", "--num-layers", "7")
    layers = ("--pipeline-layers", "2,3,2,0")
    ours = train(2, *job, "--pipeline-model-parallel-size", "2", *under("v-half"), *layers)
    stock = train.stock(1, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def said(megatron, *flags: str) -> str:
    """What a job's first rank says of its plan, before it is stopped by what it cannot have."""
    job = [*MODEL, "--train-iters", "1", "--global-batch-size", "8", "--pipeline-model-parallel-size", "4"]
    ((code, text), *_) = megatron("outputs", 4, [*job, "--pipeline-schedule", "v-half", *flags])
    assert code == 0, text
    return next(line for line in text.splitlines() if line.startswith("pipeline schedule: planned for "))


def test_a_job_says_what_was_assumed(megatron, tmp_path: Path):
    by_arithmetic = said(megatron)
    assert "by the model's arithmetic; the output layer counted as" in by_arithmetic
    assert "F,I,W 1,1,2 as given" in said(megatron, "--pipeline-costs", "1,1,2")
    path = written(
        tmp_path / "profile.json",
        8,
        ends=[stage(0, 20, 24, 16, held=10)] * 2,
        model={"layers": 8, "hidden_size": 32, "heads": 4, "sequence_length": 16, "vocabulary": 96},
        tensor_parallel=1,
    )
    measured = said(megatron, "--pipeline-costs", str(path))
    assert f"measured times ({path}); the output layer counted as 2 decoder layers" in measured


def test_a_job_says_where_its_layers_are(megatron):
    line = said(megatron, *AUTO, "--num-layers", "9")
    layout = line.rpartition("; layers ")[2]
    assert layout.count("t") == 9
    assert layout.startswith("E")
    assert layout.endswith("L")
    assert layout.count("|") == 7


def test_layers_given_for_each_stage_are_in_the_layout(megatron):
    line = said(megatron, "--pipeline-layers", "1,1,2,1,1,1,1,1", "--num-layers", "9")
    assert line.endswith("; layers Et|t|tt|t|t|t|t|tL")
