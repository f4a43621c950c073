"""Activations that go to the host and come back: the losses and gradients of stock's own run, to the bit."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.textforms import to_csv
from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.test_same_result import assert_same_losses, differing
from tools.gpu_tests.offloaded import offloaded


def as_file(path: Path, name: str, ranks: int, microbatches: int) -> tuple[str, ...]:
    """The flags for a schedule by name, with O and L, given as a CSV; some microbatches stay."""
    schedule = offloaded(
        plan(Request(name, ranks, microbatches)), lambda stage, m: None if (stage + m) % 4 == 3 else (m % 3, stage % 3)
    )
    path.write_text(to_csv(schedule))
    return ("--pipeline-schedule", "file", "--pipeline-schedule-file", str(path))


def test_smoke(train, tmp_path):
    job = ("--train-iters", "2", "--global-batch-size", "6", "--pipeline-model-parallel-size", "2")
    ours = train(2, *job, *as_file(tmp_path / "o.csv", "v-half", 2, 6))
    stock = train.stock(2, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
