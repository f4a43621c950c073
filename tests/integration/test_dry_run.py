"""A dry run says what a job would be, without the job: from a plain ``python``, from a launcher's processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.environment import assumed_gpus, is_first
from tests.integration.results import MODEL, UNTIED

ROOT = Path(__file__).resolve().parents[2]
JOB = [*MODEL, *UNTIED, *"--train-iters 1 --hidden-size 2048 --seq-length 2048 --max-position-embeddings 2048".split()]
V_HALF = "--pipeline-schedule v-half --pipeline-model-parallel-size 2 --global-batch-size 8".split()
AUTO = ("--pipeline-layers", "auto")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT")


def said(megatron: Any, *flags: str, world: int = 1) -> tuple[int, str]:
    """How the first rank of a dry run ends; the others say nothing and end well."""
    first, *others = megatron("outputs", world, [*JOB, *V_HALF, *flags])
    assert others == [(0, "")] * (world - 1)
    return int(first[0]), str(first[1])


def together(text: str) -> list[float]:
    """What each rank holds on its device, in GiB."""
    rows = re.findall(r"^\d+ +[\d+]+ +(.*)$", text, re.MULTILINE)
    return [float(row.split()[5]) for row in rows]


def test_without_a_launcher_as_on_a_login_node():
    """Layers of Transformer Engine, NCCL, four replicas: nothing of which is here."""
    left_out = ("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion")
    job = [word for word in JOB if word not in left_out]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    command = [sys.executable, "-W", "ignore", "pretrain_gpt.py", *job, *V_HALF, "--bf16", "--pipeline-dry-run", "8"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    text = done.stdout
    assert "dry run, nothing is started: 8 GPUs (as given), parallel: pipeline 2, data 4" in text
    assert "pipeline schedule: v-half, 2 ranks, 2 microbatches, planned bubble" in text
    assert "activations as layers of transformer_engine keep them, attention in one kernel" in text
    assert "layers by stage: Ett|tt|tt|ttL" in text
    assert len(together(text)) == 2
    assert "not counted: the CUDA context" in text


def test_layers_and_memory_of_a_hybrid_model_are_told(megatron):
    model = ("--num-experts", "4", "--hybrid-layer-pattern", "M-|*-M|E|GE/*E")
    status, text = said(megatron, "--pipeline-dry-run", "2x80GiB", *model)
    assert status == 0
    assert "activations as layers of transformer_engine keep them, attention in one kernel" in text
    assert "layers by stage: M-|*-M|E|GE\n" in text
    assert re.findall(r"^\d +(\d\+\d) ", text, re.MULTILINE) == ["2+2", "3+1"]
    assert "fits 80.00 GiB" in text
    assert said(megatron, "--pipeline-dry-run", "2x1GiB", *model)[0] == 3


def test_layers_that_the_plan_places_are_printed_as_a_pattern(megatron):
    pattern = "*-*-*-*-*"
    status, text = said(megatron, "--pipeline-dry-run", "2", "--hybrid-layer-pattern", pattern, *AUTO)
    placed = re.findall(r"(?:; layers|layers by stage:) (\S+)$", text, re.MULTILINE)
    assert status == 0 and len(placed) == 2 and placed[0] == placed[1], text
    assert placed[0].count("|") == 3 and placed[0].replace("|", "") == pattern


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("M-*X", "'M-*X' has 'X', which is no layer: use * (attention), + (multi-latent attention), - (MLP), E"),
        ("M-*E", "has experts (E): give --num-experts"),
        ("M-D-", "sparse attention (D) needs --dsa-indexer-n-heads: give it"),
    ],
)
def test_a_pattern_that_is_no_model_is_refused(megatron, pattern: str, why: str):
    status, text = said(megatron, "--pipeline-dry-run", "2", "--hybrid-layer-pattern", pattern)
    assert (status, why in text) == (2, True), text


@pytest.mark.job
def test_of_a_launchers_processes_the_first_speaks(megatron):
    status, text = said(megatron, "--pipeline-dry-run", world=4)
    assert status == 0
    assert "4 GPUs (from $WORLD_SIZE), parallel: pipeline 2, data 2" in text


@pytest.mark.job
def test_what_the_job_would_be_refused_for_is_refused_by_the_first(megatron):
    status, text = said(megatron, "--pipeline-dry-run", "3", world=2)
    assert status == 2
    assert text.startswith("pretrain_gpt.py: error: --pipeline-dry-run 3: 3 processes do not divide into tensor")


def test_where_it_does_not_fit_a_status_and_what_would_help(megatron):
    status, text = said(megatron, "--pipeline-dry-run", "2")
    held = together(text)
    assert status == 0
    assert max(held) > 1, "or the table's two digits say nothing"
    room = 0.8 * max(held)
    assert said(megatron, "--pipeline-dry-run", f"2x{2 * max(held)}GiB")[0] == 0
    status, text = said(megatron, "--pipeline-dry-run", f"2x{room}GiB")
    assert status == 3
    verdict, advice = (line for line in text.splitlines() if line.startswith(("does not fit", "would fit")))
    assert f"rank {held.index(max(held))} holds most, {max(held):.2f} GiB" in verdict
    # What is advised is what the job would then say.
    flags, _, rest = advice.removeprefix("would fit: with ").partition(" (")
    status, text = said(megatron, "--pipeline-dry-run", f"2x{room}GiB", *flags.split())
    assert status == 0, text
    assert max(together(text)) == pytest.approx(float(rest.split()[0]), abs=0.01)


@pytest.mark.nightly
def test_the_limit_of_an_adaptive_plan_is_seen_in_bytes(megatron):
    adaptive = "--pipeline-schedule adaptive --pipeline-dry-run 2 --pipeline-memory-limit"
    less, more = (together(said(megatron, *adaptive.split(), limit)[1]) for limit in ("0.8", "1.2"))
    assert all(a < b for a, b in zip(less, more, strict=True))


@pytest.mark.parametrize(
    ("around", "sizes", "given", "gpus"),
    [
        ({}, ParallelSizes(0, 4, 2), None, 8),
        # Experts go over data-parallel ranks, of which there are as many as that takes.
        ({}, ParallelSizes(0, 4, expert=8, has_experts=True), None, 32),
        ({"SLURM_NTASKS": "16"}, ParallelSizes(0, 1), None, 16),
        ({"SLURM_NTASKS": "16", "WORLD_SIZE": "64"}, ParallelSizes(0, 1), None, 64),
        ({"SLURM_NTASKS": "16", "WORLD_SIZE": "64"}, ParallelSizes(0, 1), 512, 512),
    ],
    ids=["one replica", "one replica with experts", "SLURM's", "torchrun's", "as given"],
)
def test_the_number_of_gpus_is_assumed_from_launcher_and_sizes(
    monkeypatch, around: dict[str, str], sizes: ParallelSizes, given: int | None, gpus: int
):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert assumed_gpus(sizes, given)[0] == gpus


@pytest.mark.parametrize(
    ("around", "first"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False), ({"SLURM_PROCID": "2"}, False)],
)
def test_which_process_speaks(monkeypatch, around: dict[str, str], first: bool):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert is_first() == first
