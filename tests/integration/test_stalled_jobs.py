"""A job whose pipeline has stalled ends soon, with a status and one line that says where."""

from __future__ import annotations

import re

import pytest

from megatron.schedules.job.flags import STALL_VARIABLE
from tests.integration import stalled_step
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron

LIMIT = 4.0
JOB = "--train-iters 3 --global-batch-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b".split()
WATCHED = [*MODEL, *UNTIED, *JOB]


@pytest.mark.job
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        (
            "sleeps",
            {1: 1},
            r"pipeline rank 1 of 2 \(global rank 1\) has stalled for (\S+) s in 1F1, which takes longer .*; "
            rf"host at {stalled_step.__file__}:\d+ \(forward_step\); .*STALL_SECONDS \(4\)",
        ),
        (
            "is stopped",
            {0: 1},
            r"pipeline rank 0 of 2 \(global rank 0\) has stalled for (\S+) s at 0B1: stage 0's output's gradient "
            r"of microbatch 1 has not come from pipeline rank 1, .*; host at \S+ \(train_step\); .*STALL_SECONDS \(4\)",
        ),
    ],
    ids=["the stalled rank says where", "of one that cannot speak its neighbour says it"],
)
def test_a_rank_that_stalls_in_its_forward_step_ends_the_job(
    megatron: Megatron, monkeypatch: pytest.MonkeyPatch, how: str, status: dict[int, int], said: str
) -> None:
    """In the second iteration, after one that went well."""
    monkeypatch.setenv(STALL_VARIABLE, str(LIMIT))
    with pytest.raises(AssertionError) as failed:
        megatron("stalled", 2, WATCHED, how)
    output = str(failed.value)
    assert output.startswith(f"exit status by rank: {status}"), output
    assert "iteration        1/" in output, output
    (line,) = [line for line in output.splitlines() if "has stalled" in line]
    found = re.fullmatch(rf"\S*: error: {said}", line)
    assert found, line
    assert LIMIT <= float(found[1]) < 1.5 * LIMIT


@pytest.mark.parametrize("limit", ["0", "60"])
def test_it_watches_unless_turned_off(megatron: Megatron, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv(STALL_VARIABLE, limit)
    threads = megatron("stalled", 2, WATCHED, "never")
    assert ["pipeline stall watch" in names for names in threads] == [limit != "0"] * 2
