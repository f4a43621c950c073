"""``--pipeline-schedule auto``: stock's losses, a plan within the device's memory, and a reason for the choice."""

from __future__ import annotations

import re

import pytest

from tests.integration.features import FULL
from tests.integration.results import MODEL, UNTIED
from tests.integration.test_dry_run import JOB, together
from tests.integration.test_same_result import assert_same_losses, differing

AUTO = "--pipeline-schedule auto --pipeline-model-parallel-size 2 --global-batch-size 8".split()


@pytest.fixture(autouse=True)
def _quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_SCHEDULES_SEARCH_SECONDS", "0.1")


@pytest.mark.job
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param((), id="no limit", marks=pytest.mark.nightly),
        pytest.param(("--pipeline-memory-limit", "0.4"), id="little memory"),
    ],
)
def test_it_trains_to_stocks_losses(train, limit):
    """Seven layers, which no number of stages divides."""
    job = ("--train-iters", "3", "--global-batch-size", "8", "--num-layers", "7")
    ours = train(2, *job, *AUTO[:4], *limit)
    stock = train.stock(1, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize(
    "recompute",
    [f"{FULL} uniform --recompute-num-layers 1", "--recompute-granularity selective"],
    ids=["full", "selective"],
)
def test_recompute_in_the_flags_that_is_left_out_changes_no_gradient(train, recompute):
    job = ("--train-iters", "2", "--global-batch-size", "8", *recompute.split())
    ours = train(2, *job, *AUTO[:4])
    stock = train.stock(1, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def test_megatron_is_told_to_leave_its_own_recompute_out(megatron):
    flags = f"{FULL} uniform --recompute-num-layers 1 --train-iters 1"
    (status, printed), _ = megatron("outputs", 2, [*MODEL, *UNTIED, *AUTO, *flags.split()])
    assert status == 0, printed
    assert "pipeline schedule: recompute left out (--recompute-granularity full): " in printed
    assert re.search(r"\n +recompute_granularity \.+ None\n", printed)


@pytest.mark.nightly
def test_its_plan_keeps_within_the_devices_memory_and_says_why_it_was_chosen(megatron):
    ((status, whole),) = megatron("outputs", 1, [*JOB, *AUTO, "--pipeline-dry-run", "2x64GiB"])
    assert status == 0, whole
    assert "\npipeline schedule: Schedule: " in whole and "\npipeline schedule: Bubble: " in whole
    room = round(0.9 * max(together(whole)), 2)
    ((status, less),) = megatron("outputs", 1, [*JOB, *AUTO, "--pipeline-dry-run", f"2x{room}GiB"])
    assert status == 0, less
    assert max(together(less)) <= room
    limits = [float(found) for found in re.findall(r"within the limit of ([\d.]+) GiB", whole + less)]
    assert limits[1] < limits[0]


def test_what_does_not_go_with_another_flag_is_not_chosen(megatron):
    """Iterations that are planned for their lengths recompute nothing, however little memory there is."""
    asked = [*JOB, *AUTO, "--pipeline-dry-run", "2", "--pipeline-memory-limit", "0.52", "--pipeline-plan-lengths"]
    ((status, said),) = megatron("outputs", 1, asked)
    assert status == 0, said
    assert "recomputed" not in said


def test_a_dry_run_on_a_device_without_room_shows_the_plan_that_needs_least(megatron):
    ((status, said),) = megatron("outputs", 1, [*JOB, *AUTO, "--pipeline-dry-run", "2x0.5GiB"])
    assert status == 3
    assert "does not fit 0.50 GiB, of which plans use 90 %, 0.45 GiB: rank " in said
    assert "nothing that auto may choose fits: use more GPUs" in said.splitlines()
