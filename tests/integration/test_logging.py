"""What stock writes to TensorBoard and to Weights & Biases, it writes under our schedules: every name, equal values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import tolerances
from tests.integration.conftest import Training
from tests.integration.features import FACTORS, each_schedule
from tests.integration.test_same_result import under

JOB = "--train-iters 4 --eval-interval 2 --global-batch-size 8 --pipeline-model-parallel-size 2".split()
LOGS = """
    --log-params-norm --log-num-zeros-in-grad --log-throughput --log-memory-to-tensorboard --log-timers-to-tensorboard
    --log-validation-ppl-to-tensorboard --moe-per-layer-logging --log-world-size-to-tensorboard --timing-log-level 2
    --tensorboard-log-interval 1 --wandb-project tests --wandb-exp-name this
""".split()
# Losses of their own, which are computed beside the output layer or in every layer.
MODEL = tuple(f"{FACTORS['model']['mixture of experts'].flags} --mtp-num-layers 1".split())
TIMES = ("time", "throughput", "mem", "forward", "backward", "optimizer", "batch-generator", "allgather")
PIPELINE = (
    "pipeline/bubble",
    "pipeline/planned-bubble",
    "pipeline/slowest-stage",
    "pipeline/slowest-stage-beyond-mean",
    "pipeline/planned-peak-activations-gib",
)
STEPS = [1, 2, 3, 4]

Scalars = dict[str, list[tuple[int, float]]]


def logged(train: Training, folder: Path, *flags: str) -> tuple[Scalars, Scalars]:
    """Names with steps and values, of TensorBoard and of Weights & Biases."""
    folder.mkdir()
    to = ("--tensorboard-dir", str(folder), "--wandb-save-dir", str(folder))
    train(4, *JOB, *LOGS, *to, *flags, model=MODEL)
    board = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    other: Scalars = {}
    for line in (folder / "logged.jsonl").read_text().splitlines():
        step, values = json.loads(line)
        for name, value in values.items():
            other.setdefault(name, []).append((step, value))
    return scalars, other


def results(names: Iterable[str]) -> list[str]:
    """Without what is a time or a size of memory."""
    return [name for name in names if not any(part in name for part in TIMES)]


def of_the_pipeline(scalars: Scalars) -> Scalars:
    """What stock does not write, taken out of ``scalars``."""
    return {name: scalars.pop(name) for name in list(scalars) if name.startswith("pipeline/")}


@pytest.mark.nightly
@pytest.mark.feature("--log-*, TensorBoard, Weights & Biases")
@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_the_same_is_logged(train: Training, tmp_path: Path, schedule: str) -> None:
    stock, ours = logged(train, tmp_path / "stock"), logged(train, tmp_path / "ours", *under(schedule, "1"))
    board, other = map(of_the_pipeline, ours)
    assert {name: [step for step, _ in points] for name, points in board.items()} == dict.fromkeys(PIPELINE, STEPS)
    assert {name: [value for _, value in points] for name, points in other.items()} == {
        name: pytest.approx([value for _, value in points]) for name, points in board.items()
    }
    assert all(0 < value < 1 for _, value in board["pipeline/bubble"])
    for theirs, mine in zip(stock, ours, strict=True):
        assert {"lm loss", "grad-norm", "mtp_1 loss", "load_balancing_loss"} <= theirs.keys()
        assert set(results(mine)) == set(results(theirs))
        for name in results(theirs):
            assert [step for step, _ in mine[name]] == [step for step, _ in theirs[name]], name
            values = [value for _, value in theirs[name]]
            assert [value for _, value in mine[name]] == tolerances.losses(values, tolerances.OTHER_KERNELS), name
