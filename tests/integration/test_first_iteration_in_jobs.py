"""What a real job says after its first iteration, beside its plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.schedules.planner.registry import Request, plan
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_offloaded_jobs import as_file

BEGIN = "pipeline schedule: first iteration: "


JOB = f"""
    --num-layers 8 --hidden-size 64 --seq-length 64 --max-position-embeddings 64 --train-iters 3 --eval-iters 0
    --global-batch-size 4 --bf16 {UNTIED[0]}
"""


@pytest.mark.parametrize(
    ("flags", "stays"),
    [
        ("", False),
        # A recomputed layer saves its input outside of its forward.
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            True,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["selected layers", "recomputed layers"],
)
def test_a_job_compares_itself_with_its_plan_once(megatron: Megatron, tmp_path: Path, flags: str, stays: bool) -> None:
    schedule = as_file(tmp_path / "v.csv", plan(Request("v-half", 2, 4)))
    asked = [*MODEL, *shlex.split(f"{JOB} {flags}"), *schedule, "--pipeline-measure", f"{tmp_path}:1-2"]
    (_, first), (_, other) = megatron("outputs", 2, asked)
    found = [line.removeprefix(BEGIN) for line in first.splitlines() if line.startswith(BEGIN)]
    assert BEGIN not in other
    assert found[0] == (
        "32 linears split the backward (16 ColumnParallelLinear, 16 RowParallelLinear); gradient accumulation fusion "
        "is off"
    )
    moved, planned = (float(size) for size in re.findall(r"[\d.]+", found[1]))
    assert (moved == 0) == stays == any(line.startswith("layer ") for line in found)
    assert stays or moved == pytest.approx(planned, rel=0.05)
    held, limit = (float(size) for size in re.findall(r"([\d.]+) MiB", found[-1]))
    assert held == pytest.approx(limit, rel=0.1)
