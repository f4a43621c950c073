"""The CPU stand-in: what names a CUDA device gets the CPU, wherever it is called, and layers are the local ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.results import MODEL, UNTIED
from tests.integration.server import ROOT, Megatron

ENGINE = ("--transformer-impl", "transformer_engine")
JOB = [*MODEL, *UNTIED, *ENGINE, "--train-iters", "1", "--pipeline-model-parallel-size", "2"]


def test_tensors_made_on_cuda_in_a_backward_are_on_the_cpu(megatron: Megatron) -> None:
    """Torch leaves its function modes in a backward."""
    assert megatron("devices_in_a_backward") == ["cpu"] * 4


@pytest.mark.parametrize("schedule", [[], ["--pipeline-schedule", "1f1b"]], ids=["no schedule", "1f1b"])
def test_layers_of_transformer_engine_are_refused_on_a_cpu(megatron: Megatron, schedule: list[str]) -> None:
    ended = megatron("outputs", 2, [*JOB, *schedule])
    assert [status for status, _ in ended] == [2, 2]
    assert [printed.splitlines()[-1] for _, printed in ended if ": error: " in printed] == [
        "pretrain_gpt.py: error: --transformer-impl transformer_engine does not work here: Transformer Engine is not "
        "installed; on a CPU give --transformer-impl local"
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (
            "1f1b",
            "--transformer-impl transformer_engine does not work here: {}; on a CPU give --transformer-impl local",
        ),
        (
            "zb-1p",
            "--pipeline-schedule zb-1p does not work with --transformer-impl transformer_engine here: {}; use "
            "--transformer-impl local",
        ),
    ],
)
def test_a_transformer_engine_without_a_gpu_is_left_out(tmp_path: Path, schedule: str, said: str) -> None:
    """Which ends in an error of its own where it is imported."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise OSError('no library')")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "pretrain_gpt.py", *JOB, "--pipeline-schedule", schedule],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert (ended.returncode, last) == (2, f"pretrain_gpt.py: error: {said.format('Transformer Engine needs a GPU')}")
