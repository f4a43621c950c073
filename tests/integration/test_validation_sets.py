"""Evaluation on several data sets, each in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tolerances
from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_same_result import under
from tools import preprocess_data

BYTES = "--vocab-size 257 --make-vocab-size-divisible-by 1".split()
ONCE = (
    "--train-iters 1 --global-batch-size 1 --lr 0 --min-lr 0 --save-interval 1 --no-save-optim --eval-iters 0".split()
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name three byte-level data sets: one to train on, two to validate on."""
    folder = tmp_path_factory.mktemp("text")
    texts = {"train": "some text to train on. " * 99, "one": "to validate on. " * 40, "other": "another. " * 50}
    for name, text in texts.items():
        (folder / name).write_text(text)
        files = ["--output-prefix", str(folder / name), "--input", str(folder / name)]
        assert preprocess_data.main(["--append-eod", *files]) == 0
    train, *valid = (str(folder / f"{name}_text_document") for name in texts)
    return ["--train-data-path", train, "--valid-data-path", *valid]


@pytest.mark.feature("several validation sets, each in full")
@pytest.mark.parametrize("schedule", each_schedule("v-min"))
def test_each_validation_set_in_full(megatron: Megatron, data: list[str], tmp_path: Path, schedule: str) -> None:
    model = [flag for flag in [*MODEL, *UNTIED, *BYTES] if flag != "--mock-data"]
    megatron("train", 1, [*model, *ONCE, "--mock-data", "--save", str(tmp_path)])
    job = [*model, *data, "--load", str(tmp_path), "--finetune", "--no-load-optim", "--no-load-rng"]
    job += "--train-iters 2 --global-batch-size 8 --pipeline-model-parallel-size 2".split()
    job += ["--multiple-validation-sets", "--full-validation", "--eval-interval", "2"]
    stock, ours = megatron("train", 2, job), megatron("train", 2, [*job, *under(schedule)])
    assert len(stock.evaluations) == 4
    assert len(set(stock.evaluations[:2])) == 2
    assert ours.losses == tolerances.losses(stock.losses)
    assert ours.evaluations == tolerances.losses(stock.evaluations)
