"""A launcher's environment is read in plain whole numbers, or refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.environment import assumed_gpus, check_environment
from megatron.schedules.utils.errors import PlanError
from tests.integration.results import MODEL
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
READ = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PP4 = "--train-iters 1 --global-batch-size 4 --pipeline-model-parallel-size 4 --pipeline-schedule v-half".split()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*READ, "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("text", ["²", "٣", "", "four", "1_0", "-1", "9" * 20, "9" * 5000], ids=lambda text: text[:24])
def test_a_variable_that_is_no_possible_number_is_named(monkeypatch, name: str, text: str):
    monkeypatch.setenv(name, text)
    with pytest.raises(PlanError, match=rf"^\${name} must be "):
        check_environment()


@pytest.mark.parametrize("text", ["²", "٣", "0", "9" * 20])
def test_so_is_slurms_number_of_tasks_in_a_dry_run(monkeypatch, text: str):
    monkeypatch.setenv("SLURM_NTASKS", text)
    with pytest.raises(PlanError, match=r"^\$SLURM_NTASKS must be "):
        assumed_gpus(ParallelSizes(0, 1), None)


def test_a_rank_beyond_the_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"\$RANK must be less than \$WORLD_SIZE, which is 4, not 4"):
        check_environment()


@pytest.mark.parametrize(
    ("around", "flags", "said"),
    [
        ({"WORLD_SIZE": "²"}, [], "$WORLD_SIZE must be a whole number, not '²'"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, [], "$RANK must be a whole number, not 'x'"),
        ({"SLURM_NTASKS": "²"}, ["--pipeline-dry-run"], "$SLURM_NTASKS must be a whole number, not '²'"),
    ],
    ids=["number of processes", "rank", "tasks in a dry run"],
)
def test_the_program_refuses_it_in_one_line(monkeypatch, around: dict[str, str], flags: list[str], said: str):
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "pretrain_gpt.py", *MODEL, *PP4, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pretrain_gpt.py: error: {said}")
    assert done.stderr.count("\n") == 1
