"""Jobs that measure themselves: what they write is what the next plan and the next job are made for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.results import MODEL, UNTIED

JOB = [*MODEL, *UNTIED, *"--train-iters 4 --global-batch-size 8".split()]


def profiled(megatron, file: Path, world: int, flags: str) -> tuple[JobProfile, list[str]]:
    """What a job with ``flags`` measured, and what each rank said."""
    found = megatron("outputs", world, [*JOB, *flags.split(), "--pipeline-measure", f"{file.parent}:2-4"])
    assert [code for code, _ in found] == [0] * world
    profile = read_profile(file)
    assert isinstance(profile, JobProfile)
    return profile, [text for _, text in found]


@pytest.mark.job
def test_a_job_measures_itself_and_the_next_is_planned_for_that(megatron, tmp_path, capsys):
    file = tmp_path / "costs.json"
    flags = "--pipeline-model-parallel-size 2 --pipeline-schedule v-half"
    profile, said = profiled(megatron, file, 2, flags)
    assert (profile.schedule, profile.iterations, profile.layers) == ("v-half", (3, 4), (2,) * 4)
    assert all(stage.median(kind) > 0 for stage in profile.stages for kind in (Kind.F, Kind.I, Kind.W))
    # Inputs and gradients of a layer's linears wait for W: 16 hidden states each, the wide ones four of them.
    assert {stage.sizes[Share.WEIGHTS] for stage in profile.stages} == {2 * 16 * 32 * 4 * 16}
    assert profile.stages[-1].held > profile.stages[1].held > profile.stages[1].sizes[Share.WEIGHTS]
    assert [latency[:2] for latency in profile.latencies] == [(0, 1), (1, 0)]
    (table,) = [text for text in said if "measured: v-half in iterations 3-4" in text]
    assert "F (forward)" in table and "a message takes" in table and f"costs written to {file}" in table

    assert (
        main(["plan", "--schedule", "v-half", "--microbatches", "8", "--pipeline-size", "2", "--costs", str(file)]) == 0
    )
    assert "bubble" in capsys.readouterr().out
    next_job = f"{flags} --pipeline-costs {file}"
    found = megatron("outputs", 2, [*JOB, "--train-iters", "1", *next_job.split()])
    assert found[0][0] == 0 and f"planned for measured times ({file})" in found[0][1]


def test_one_profile_of_all_replicas(megatron, tmp_path):
    """Two of tensor parallel; a backward that is never split is halved as planned."""
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --pipeline-schedule 1f1b"
    profile, said = profiled(megatron, tmp_path / "costs.json", 4, flags)
    assert profile.replicas == 2 and all(stage.halved for stage in profile.stages)
    for stage in profile.stages:
        assert stage.median(Kind.I) + stage.median(Kind.W) == pytest.approx(stage.median(Kind.B))
    assert sum("measured: 1f1b in iterations" in text for text in said) == 1
    assert "I (input gradient)" not in said[0], "nobody measured that"
    assert json.loads((tmp_path / "costs.json").read_text())["model"]["vocabulary"] == 96


def test_to_measure_changes_no_loss(train, tmp_path):
    job = (*UNTIED, *"--train-iters 3 --global-batch-size 4 --pipeline-model-parallel-size 2".split())
    measure = "--pipeline-measure", f"{tmp_path}:1-3"
    plain, measured = (train(2, *job, "--pipeline-schedule", "v-half", *more) for more in ((), measure))
    assert plain.losses == measured.losses


@pytest.mark.nightly
def test_iterations_go_on_counting_after_a_resume(megatron, tmp_path):
    flags = [*JOB, *"--pipeline-model-parallel-size 2 --pipeline-schedule v-half --eval-iters 0".split()]
    saved = "--save", str(tmp_path / "saved"), "--save-interval", "2"
    assert megatron("outputs", 2, [*flags, *saved, "--exit-interval", "2"])[0][0] == 0
    file = tmp_path / "costs.json"
    resumed = [*flags, "--load", str(tmp_path / "saved"), "--pipeline-measure"]
    late = megatron("outputs", 2, [*resumed, f"{tmp_path}:2-4"])
    assert late[0][0] == 0 and not file.exists()
    assert "the job is at iteration 3 already, and --pipeline-measure begins with 2" in late[0][1]
    assert megatron("outputs", 2, [*resumed, f"{tmp_path}:3-4"])[0][0] == 0
    profile = read_profile(file)
    assert isinstance(profile, JobProfile) and profile.iterations == (4, 4)


def test_hidden_messages_change_no_cost_and_are_measured_apart(megatron, tmp_path):
    """Passes are measured with nothing behind messages: bytes, too, are those of a job that hides none.

    By its name the schedule would leave other backwards whole in one of the jobs.
    """
    order = tmp_path / "order.csv"
    order.write_text(to_csv(plan(Request("v-zb", 2, 4))))
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
    flags = f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --pipeline-schedule {order} {experts}"
    hides = f"{flags} --overlap-moe-expert-parallel-comm"
    found = {}
    for name, job in (("exposed", flags), ("hidden", hides)):
        (tmp_path / name).mkdir()
        found[name], said = profiled(megatron, tmp_path / name / "costs.json", 4, job)
    plain, measured = found.values()
    assert [stage.held for stage in measured.stages] == [stage.held for stage in plain.stages]
    assert [stage.sizes for stage in measured.stages] == [stage.sizes for stage in plain.stages]
    assert not any(stage.messages for stage in plain.stages) and plain.exposed is None
    for stage in measured.stages:
        for kind in (Kind.F, Kind.I):
            assert 0 < stage.messages[kind] < stage.median(kind)
    assert measured.exposed is not None
    (table,) = [text for text in said if "measured: order.csv in iterations 3-4" in text]
    assert "with nothing behind messages of experts F waits" in table and "behind them leave" in table
    costs = f"--pipeline-costs {tmp_path / 'hidden' / 'costs.json'} --pipeline-dry-run 4"
    for job, says in ((hides, True), (flags, False)):
        (_, text), *_ = megatron("outputs", 1, [*JOB, *f"{job} {costs}".split()])
        assert ("behind weight gradients" in text) is says
