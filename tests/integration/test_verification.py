"""``--pipeline-verify`` runs a job's first iteration twice, and ends with 0 if gradients are equal, else with 1."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.integration.results import MODEL, UNTIED
from tests.integration.test_core_loops import CHUNKS, PIPELINE
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import some_by_night

JOB = [*MODEL, *UNTIED, "--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"]
EQUAL = re.compile(r"verify: gradients +(\d+) parameters on (\d+) ranks: all equal to the bit")


def ended(megatron: Any, world: int, schedule: str, flags: str = "", fault: str | None = None) -> tuple[int, str]:
    """The exit status, the same on all ranks, and what the first rank printed."""
    job = [*JOB, "--pipeline-schedule", schedule, *shlex.split(flags)]
    ranks = megatron("verified", world, job, fault)
    assert len({status for status, _ in ranks}) == 1
    assert all("pipeline schedule: verify" not in printed for _, printed in ranks[1:])
    return ranks[0]


RIGHT = {
    "v-half, dropout": (2, "v-half", "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "zb-1p, data parallel, overlapped, distributed optimizer": (
        4,
        "zb-1p",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "adaptive, recompute": (
        2,
        "adaptive",
        "--pipeline-memory-limit 0.4 --pipeline-save-memory recompute --pipeline-costs 4,4,3 --hidden-dropout 0.1",
    ),
    "large vocabulary": (2, "v-half", "--pipeline-vocabulary-parallel"),
    "nothing split": (2, "1f1b", "--hidden-dropout 0.1"),
}


@pytest.mark.job
@pytest.mark.parametrize("case", some_by_night(RIGHT, lambda case: "data parallel" not in case))
def test_a_right_job_ends_with_0_before_its_second_iteration(megatron: Any, case: str) -> None:
    world, schedule, flags = RIGHT[case]
    status, printed = ended(megatron, world, schedule, flags)
    assert status == 0, printed[-3000:]
    found = EQUAL.search(printed)
    assert found is not None and int(found[1]) > 90 and int(found[2]) == world
    assert "verify: loss" in printed and "exit status 0" in printed and "iteration        1/" not in printed
    assert re.search(r"verify: peak memory +[\d.]+ MiB of activations on rank \d, planned [\d.]+ MiB", printed)
    assert ("splits no backward" in printed) == (schedule == "1f1b")


WRONG = {
    "W left out": r"of stage [12] on rank 1 differs by \S+ of its norm",
    "stale operand": r"linear_\w+\.weight of stage [12] on rank 1 differs by \S+ of its norm",
    "hook fires twice": r"of stage [12] on rank 1: hooks fired 5 times instead of 4",
    "W in another order": "the last digits differ: gradients are summed in another order",
    "W left out, and kernels that repeat nothing": r"the reference from itself by \S+",
}


@pytest.mark.job
@pytest.mark.parametrize("fault", some_by_night(WRONG, lambda fault: fault not in ("W left out", "hook fires twice")))
def test_a_planted_fault_ends_every_rank_with_1(megatron: Any, fault: str) -> None:
    status, printed = ended(megatron, 2, "v-half", "--pipeline-costs 1,1,1", fault)
    assert status == 1 and "WRONG" in printed, printed[-3000:]
    assert re.search(WRONG[fault], printed), printed[-3000:]


def test_kernels_that_are_not_deterministic_are_told_from_faults(megatron: Any) -> None:
    status, printed = ended(megatron, 2, "v-half", fault="kernels that repeat nothing")
    assert status == 0 and "some kernels are not deterministic" in printed, printed[-3000:]


# An R that would come before its F keeps these microbatches from being renumbered.
ORDER = "0F0,0R0,0F1,0F2,0I1,0I0,0I2,0W2,0W0,0W1\n1F0,1F1,1F2,1I1,1I0,1I2,1W0,1W2,1W1\n"


def test_an_order_of_w_that_is_not_that_of_i_is_right(megatron: Any, tmp_path: Path) -> None:
    """Norms are summed in the order of I's, linears in that of W's."""
    (tmp_path / "order.csv").write_text(ORDER)
    status, printed = ended(megatron, 2, str(tmp_path / "order.csv"), "--global-batch-size 3")
    assert status == 0 and EQUAL.search(printed), printed[-3000:]


LOOPS: dict[str, tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "zb-1p": (2, {PIPELINE: 2}, {"schedule": "zb-1p"}, {}),
    "v-half, no wrapper": (2, {PIPELINE: 2, CHUNKS: 2}, {"schedule": "v-half"}, {"wrapped": False}),
}


@pytest.mark.parametrize("case", LOOPS)
def test_any_loop_is_verified_and_all_its_state_restored(megatron: Any, case: str) -> None:
    """Random numbers of three libraries, buffers, attributes, samples changed in place, and gradients from before."""
    world, groups, settings, options = LOOPS[case]
    ranks = megatron("verified_loop", world, groups, {**settings, "verify": True}, **options)
    for status, printed, read in ranks:
        assert status == 0, printed
        assert read == 5 * groups.get(CHUNKS, 1)
    assert EQUAL.search(ranks[0][1]), ranks[0][1]


def test_a_weight_that_more_than_its_linear_uses_is_right_up_to_the_order_of_sums(megatron: Any) -> None:
    settings, groups = {"schedule": "v-half", "verify": True}, {PIPELINE: 2, CHUNKS: 2}
    ranks = megatron("verified_loop", 2, groups, settings, regularized=True)
    printed = ranks[0][1]
    assert [status for status, *_ in ranks] == [0, 0], printed
    assert re.search(r"verify: in two parts +1 gradient, .*\(.*linear_fc2.weight of stage 3 on rank 0\)", printed)
    assert "verify: result        right: the schedule changes gradients by the order of a sum only" in printed, printed


FP8 = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"


def test_delayed_scaling_begins_each_run_alike(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales follow the maxima of earlier microbatches."""
    monkeypatch.setenv(CAPABILITY_VARIABLE, "9.0")
    local = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
    job = [flag for flag in JOB if flag not in local]
    ranks = te("verified", 2, [*job, "--bf16", "--pipeline-schedule", "zb-1p", *FP8.split()], None)
    assert [status for status, _ in ranks] == [0, 0], ranks[0][1][-3000:]
    assert EQUAL.search(ranks[0][1])


def test_a_dry_run_plans_as_without_the_flag(megatron: Any) -> None:
    ((status, printed),) = megatron(
        "outputs", 1, [*JOB, "--pipeline-schedule", "v-half", "--pipeline-verify", "--pipeline-dry-run", "2"]
    )
    assert status == 0 and "verify" not in printed
