"""What stock does with data iterators outside the schedule: skip iterations, save the state of a loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under

JOB = ("--train-iters", "4", "--global-batch-size", "3", *CLIP_NOTHING)


@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_after_skipped_iterations_all_chunks_go_on_with_the_same_samples(train: Any, schedule: str) -> None:
    """Which sample a chunk reads decides its embedding or its loss: one sample too many changes every gradient."""
    job = (*JOB, "--pipeline-model-parallel-size", "2", "--iterations-to-skip", "1", "3")
    ours, stock = train(2, *job, *under(schedule)), train.stock(2, *job)
    assert ours.iterations == stock.iterations == [2, 4]
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def test_iterations_are_skipped_where_ranks_read_no_data(train: Any) -> None:
    """Stock's own 1F1B fails here, so two ranks are compared with."""
    job, size = (*JOB, "--iterations-to-skip", "2"), "--pipeline-model-parallel-size"
    ours, stock = train(4, *job, size, "4", *under("zb-1p")), train.stock(2, *job, size, "2")
    assert ours.iterations == stock.iterations == [1, 3, 4]
    assert_same_losses(ours, stock)


def test_a_loader_of_ones_own_is_skipped_and_saved_with_its_state(megatron: Megatron, tmp_path: Path) -> None:
    """Its state is that after both chunks' samples: three microbatches in each of four iterations."""
    job = [*MODEL, *UNTIED, *JOB, "--pipeline-model-parallel-size", "2", "--iterations-to-skip", "2"]
    job += ["--dataloader-type", "external", "--save-interval", "4"]
    stock = megatron("train", 2, [*job, "--save", str(tmp_path / "stock")], samples="own loader")
    ours = megatron("train", 2, [*job, *under("v-half"), "--save", str(tmp_path / "ours")], samples="own loader")
    files = [list((tmp_path / name).rglob("train_dataloader_dprank000.pt")) for name in ("stock", "ours")]
    read = [torch.load(file)["dataloader_state_dict"] for (file,) in files]
    assert read == [{"read": 12}, {"read": 12}]
    assert ours.iterations == stock.iterations == [1, 3, 4]
    assert len(ours.losses) == 3


def test_iterations_that_a_file_skips_are_refused_where_samples_are_read_ahead(
    megatron: Megatron, tmp_path: Path
) -> None:
    """Megatron reads the file when it validates its arguments, and writes a line about it."""
    file = tmp_path / "tracker"
    line = (
        "ts=1 node=a device=0 jobID={} rank=0 iteration=3 status=RerunDiagnostic.RERUN_DISABLED result=nan message=x\n"
    )
    file.write_text(line.format(1) + line.format(2))
    job = [*MODEL, *UNTIED, *JOB, "--pipeline-model-parallel-size", "2", *under("v-half"), "--pipeline-plan-lengths"]
    found = megatron("outputs", 2, [*job, "--result-rejected-tracker-filename", str(file)])
    assert [code for code, _ in found] == [2, 2]
    assert "--pipeline-plan-lengths does not go with --result-rejected-tracker-filename" in found[0][1]


def test_a_job_whose_last_measured_iteration_is_skipped_writes_the_costs_of_the_others(
    megatron: Megatron, tmp_path: Path
) -> None:
    job = [*MODEL, *UNTIED, *JOB, "--pipeline-model-parallel-size", "2", *under("v-half"), "--eval-iters", "0"]
    found = megatron("outputs", 2, [*job, "--pipeline-measure", f"{tmp_path}:1-3", "--iterations-to-skip", "3"])
    assert [code for code, _ in found] == [0, 0]
    assert (tmp_path / "costs.json").exists()
