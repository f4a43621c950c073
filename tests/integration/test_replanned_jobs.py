"""Jobs that plan again: all ranks switch at one iteration, losses are the same to the bit, failures change nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Training
from tests.integration.results import MODEL, UNTIED
from tests.tiers import by_night

JOB = [*MODEL, *UNTIED, *"--global-batch-size 8 --pipeline-model-parallel-size 2 --train-iters 9 --lr 1e-2".split()]
NAMED = [*JOB, "--pipeline-schedule", "v-half"]


# Measured in iterations 3 to 8 where nobody says when.
@pytest.fixture
def early(tmp_path: Path) -> list[str]:
    """Measures sooner."""
    return ["--pipeline-measure", f"{tmp_path}:2-3"]


ADAPTIVE = [*JOB, *"--pipeline-schedule adaptive:2".split()]


MEASURES = "pipeline schedule: auto has no measured costs: it measures iterations"
TOO_SOON = "pipeline schedule: the job does not plan again"


def said(ranks: Any) -> list[str]:
    """What the first rank said of it."""
    lines = r"^pipeline schedule: (WARNING: .*plan.*|a plan for .*|replanned: .*|memory limit: .*)$"
    return re.findall(lines, ranks[0][2], re.MULTILINE)


def switches(ranks: Any, iterations: int) -> set[tuple[int, ...]]:
    """After how many iterations each rank began to run another program, all ranks' together."""
    found = set()
    for programs, _, _ in ranks:
        assert len(programs) == iterations
        found.add(tuple(at for at in range(1, iterations) if programs[at] != programs[at - 1]))
    return found


@pytest.fixture(scope="module")
def before(megatron: Any) -> list[float]:
    """The losses of a job that plans once."""
    losses: list[float] = megatron("replanned", 2, NAMED)[-1][1]
    assert len(losses) == 9
    return losses


@pytest.mark.job
@pytest.mark.parametrize(("sooner", "at"), [(True, 4), by_night(False, 9)])
def test_all_ranks_switch_at_one_iteration_and_losses_stay_the_same(
    megatron: Any, before: list[float], early: list[str], sooner: bool, at: int
) -> None:
    """The plan begins at the boundary after the profile's end, is there at the next, and runs in the one after that."""
    flags = early if sooner else []
    more = [] if sooner else ["--train-iters", "11", "--lr-decay-iters", "9"]
    ranks = megatron("replanned", 2, [*NAMED, *flags, "--pipeline-replan", *more], ["v-zb"])
    assert switches(ranks, 11 if more else 9) == {(at + 1,)}
    assert ranks[-1][1][:9] == before
    assert len(said(ranks)) == 1
    assert said(ranks)[0].startswith("replanned: iteration 20.0 -> 10.0 ms expected, bubble 20.0 -> 10.0 %; ")


@pytest.mark.job
def test_where_one_rank_cannot_switch_none_does_and_the_job_goes_on(
    megatron: Any, before: list[float], early: list[str]
) -> None:
    ranks = megatron("replanned", 2, [*NAMED, *early, "--pipeline-replan"], ["v-zb"], 1)
    assert switches(ranks, 9) == {()}
    assert ranks[-1][1] == before
    assert said(ranks) == [
        "WARNING: a new plan is not adopted, and the current one stays: rank 1: MemoryError: no room for programs"
    ]


def test_a_limit_that_is_measured_lets_the_next_plan_hold_more(megatron: Any, early: list[str]) -> None:
    """The device has room for not quite two microbatches of a rank, of which a tenth is kept free."""
    ranks = megatron("replanned", 2, [*ADAPTIVE, "--pipeline-memory-limit", "auto", *early], [], None, 300_000)
    first = re.search(r"adaptive, within [\d.]+ [KMG]iB, ([\d.]+) of 1F1B's memory", ranks[0][2])
    limit, replanned = said(ranks)
    found = re.match(r"memory limit: ([\d.]+) of 1F1B's, for .* left on .* and ([\d.]+) MiB a", limit)
    assert first is not None and found is not None
    assert float(first[1]) < 0.6 < float(found[1])
    # Of 1F1B's two microbatches, up to the digits that are said.
    assert float(found[1]) * 2 * float(found[2]) * 2**20 == pytest.approx(0.9 * 300_000, rel=0.05)
    assert replanned.startswith("replanned: iteration ")
    assert f"within {found[1]} of 1F1B's memory" in replanned
    assert switches(ranks, 9) == {(5,)}


@pytest.mark.nightly
def test_a_rank_that_becomes_slow_is_named_measured_anew_and_planned_for(megatron: Any, early: list[str]) -> None:
    """Slow from iteration 7 on, named in 9, measured from 12 to 17, planned for in 18, switched in 19."""
    job = [*NAMED, *early, "--pipeline-replan", "--train-iters", "20"]
    ranks = megatron("replanned", 2, job, ["v-zb", "v-min"], None, 0, 7)
    named = re.findall(r"WARNING: pipeline rank (\d) takes [\d.]+ x as long for its passes as when", ranks[-1][2])
    assert named[:1] == ["1"]
    assert re.findall(r"measured: \S+ in iterations (\d+-\d+)", ranks[0][2]) == ["3-3", "13-17"]
    assert [line.split(":")[0] for line in said(ranks)] == ["replanned", "replanned"]
    assert switches(ranks, 20) == {(5, 19)}


# Clipping sums the norms of ranks, whose layers differ.
LONG = "--train-iters 13 --lr-decay-iters 13 --global-batch-size 8 --lr 1e-2 --num-layers 7 --clip-grad 0".split()
AUTO = "--pipeline-model-parallel-size 2 --pipeline-schedule auto".split()


def test_auto_measures_itself_and_says_what_a_plan_for_that_would_gain(megatron: Any, train: Training) -> None:
    """Seven layers, which no number of stages divides; measured in 3 to 8, planned for in 9, and no switch."""
    start = train.load(model=("--num-layers", "7"))
    ranks = megatron("replanned", 2, [*MODEL, *UNTIED, *start, *LONG, *AUTO])
    assert f"{MEASURES} 3 to 8, and says what a plan for them would gain (--pipeline-replan switches" in ranks[0][2]
    (line,) = said(ranks)
    assert line.startswith(("a plan for the measured times would be better: ", "replanned: nothing better was found"))
    expected = re.search(r"iteration ([\d.]+) -> ([\d.]+) ms expected", line)
    assert switches(ranks, 13) == {()}
    assert expected is None or float(expected[2]) < float(expected[1]), "shorter, or nothing is said"
    assert ranks[-1][1] == train.stock(1, *LONG).losses


@pytest.mark.parametrize(
    "more",
    ["--pipeline-costs 1,1,1", "--train-iters 10", "--exit-interval 10", "--pipeline-plan-lengths"],
    ids=["costs that are given", "too few iterations", "a run that ends early", "a plan for each iteration"],
)
def test_auto_does_not_measure_what_it_could_not_use(megatron: Any, more: str) -> None:
    """It says so in no line either; the plan that runs goes on."""
    short = [] if "train-iters" in more or "exit" in more else ["--train-iters", "3"]
    ranks = megatron("outputs", 2, [*MODEL, *UNTIED, *LONG, *AUTO, *more.split(), *short])
    assert [status for status, _ in ranks] == [0, 0], ranks[0][1][-2000:]
    assert MEASURES not in ranks[0][1] and "plan again" not in ranks[0][1]


def test_a_job_too_short_to_plan_again_says_so_when_it_begins(megatron: Any) -> None:
    ((status, printed), _) = megatron("outputs", 2, [*NAMED, "--pipeline-replan"])
    assert status == 0
    assert f"{TOO_SOON}: it ends with iteration 9, and a new order could run from iteration 11 on" in printed


def test_a_job_that_ends_while_it_plans_says_so(megatron: Any, early: list[str]) -> None:
    ranks = megatron("replanned", 2, [*NAMED, *early, "--pipeline-replan"], None)
    assert "\npipeline schedule: the job ends with this iteration, before it has planned again\n" in ranks[0][2]
    assert switches(ranks, 9) == {()}


def test_a_batch_size_that_grows_while_the_job_plans_is_planned_for(megatron: Any, early: list[str]) -> None:
    """Planned from iteration 4 on; from 5 on iterations have 8 microbatches and not 4."""
    job = [*MODEL, *UNTIED, *"--pipeline-model-parallel-size 2 --pipeline-schedule v-half --train-samples 56".split()]
    grows = ["--step-batch-size-schedule", "0:4 256:8"]
    ranks = megatron("replanned", 2, [*job, *grows, *early, "--pipeline-replan"], ["v-zb"])
    (line,) = said(ranks)
    assert line.startswith("replanned: iteration 20.0 -> 10.0 ms expected")
