"""What a job measured fits into a few lines, whatever its size, and says which stages stand out."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.profile_facts import CopyRates, Facts
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.report.profile_table import as_text
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.simulator import simulate

TIMES = {Kind.F: Measured(2.0, 1.9, 2.1), Kind.I: Measured(2.5, 2.5, 2.5), Kind.W: Measured(1.5, 1.5, 1.5)}


def made(ranks: int, **times: Measured) -> tuple[JobProfile, Recorded]:
    """Of which stage 3 takes twice as long for its F."""
    schedule = plan(Request("v-half", ranks, 8))
    stages = [
        StageProfile(1, {**TIMES, **times}, held=2.0**20, sizes={Share.WEIGHTS: 2.0**19})
    ] * schedule.placement.stages
    stages[3] = replace(stages[3], times=stages[3].times | {Kind.F: Measured(4.0, 3.0, 5.0)}, held=3.0 * 2**20)
    latencies = tuple((rank, rank + 1, 0.1 if rank else 0.75) for rank in range(ranks - 1))
    facts = Facts("a GPU", len(stages), 64, 4, 128, 1, 1)
    profile = JobProfile(
        facts, "v-half", schedule.placement, 8, (3, 5), 2, tuple(stages), latencies, CopyRates(20, 19, 18)
    )
    slow, planned = (simulate(schedule, costs.on(schedule.placement)) for costs in (Costs.of(2, 3, 1, 0.5), Costs()))
    return profile, Recorded(slow, planned, 5, "a GPU")


def test_it_names_what_stands_out():
    text = as_text(*made(4))
    forward = next(line for line in text.splitlines() if "F (forward)" in line)
    assert forward.split("(forward)")[1].split() == ["2", "2", "(stage", "0)", "4", "(stage", "3)", "50", "%"]
    assert "measured: v-half in iterations 3-5, 2 ranks for each stage" in text
    assert all(line.startswith("pipeline schedule: ") for line in text.splitlines())
    assert "a message takes 0.1 ms, 0.75 from rank 0 to 1" in text
    assert "holds 1 MiB on the median stage, 3 on stage 3; 40 % of it waits for W" in text
    assert "copies run at 20 GB/s out, 19 back" in text
    assert "iteration 5: " in text and "planned" in text.splitlines()[-1]


def test_it_is_no_longer_for_many_stages():
    assert len(as_text(*made(4)).splitlines()) == len(as_text(*made(32)).splitlines()) <= 7


def test_a_time_that_was_split_by_the_plan_is_no_measurement():
    profile, recorded = made(4, B=Measured(4.0, 4.0, 4.0))
    halved = replace(profile, stages=tuple(replace(stage, halved=True) for stage in profile.stages))
    assert "W (weight gradient)" in as_text(profile, recorded)
    assert "W (weight gradient)" not in as_text(halved, recorded) and "B (I and W in one)" in as_text(halved, recorded)
