"""What ``--pipeline-schedule auto`` may choose of a job, as its flags leave it open."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron.schedules.estimate.device_memory import RESERVED, Numbers
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.estimate.models import MODELS, find_model
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job import plan_job as planning
from megatron.schedules.job.auto_choices import auto_choices
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.job_request import request_of
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import JobPlan, check_fits, plan_job
from megatron.schedules.job.spec import Batch, JobModel, JobSpec, Settings, StockLayers
from megatron.schedules.job.values import DryRun, ScheduleChoice, memory_limit
from megatron.schedules.planner.partition_plans import with_layers
from megatron.schedules.planner.registry import named_within
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import Plan, make_plan, or_named
from megatron.schedules.utils.errors import PlanError

BUILD = MODELS["9.6B"].whole
MODEL = JobModel(BUILD, Numbers(2, 4, 12))
LLAMA = JobModel(find_model("Llama-3-8B --num-layers 16").whole, Numbers(2, 4, 12))


@pytest.mark.parametrize(
    ("flag", "stock", "chosen"),
    [
        (None, StockLayers(30), "auto"),
        ("even", StockLayers(30), "even"),
        ((15, 15), StockLayers(30), (15, 15)),
        (None, StockLayers(30, first=10), None),
    ],
    ids=["no flag", "even", "a list", "a flag of Megatron's"],
)
def test_layers_are_chosen_where_no_flag_says_where_they_are(flag: Any, stock: StockLayers, chosen: Any):
    settings = Settings(ScheduleChoice("auto", "auto"), layers=flag)
    first = next(auto_choices(JobSpec(settings, ParallelSizes(2, 2), layers=stock, model=MODEL, flags=FLAGS)))
    assert first.settings.layers == chosen


@pytest.mark.parametrize(
    ("layers", "recompute"),
    [((5, 4, 4, 4, 4, 3, 3, 3), StockRecompute("selective")), ((3, 3, 3, 4, 4, 4, 4, 5), StockRecompute())],
    ids=["first", "last"],
)
def test_a_named_schedule_that_just_fits_the_device_is_never_shorter(
    layers: tuple[int, ...], recompute: StockRecompute
):
    """Ranks have different parameters, and the rank with most of them need not have the most activations."""
    settings = Settings(ScheduleChoice("v-zb", "v-zb"), layers=layers)
    job = JobSpec(settings, ParallelSizes(4, 4), Batch(1, 16), StockLayers(30), recompute, model=MODEL, flags=FLAGS)
    named = plan_job(job)
    device = _most(named) * (1 + 1e-9) / (1 - RESERVED)
    asked = ScheduleChoice("auto", "auto")
    within = replace(settings, schedule=asked, search_seconds=0.1)
    found = plan_job(replace(job, settings=within), Machine(device))
    assert found.plan.iteration_time <= named.plan.iteration_time * (1 + 1e-9)
    assert _most(found) <= (1 - RESERVED) * device


@pytest.mark.nightly
def test_a_plan_that_holds_more_messages_is_made_again_within_less_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "MESSAGES", 1)
    settings = Settings(ScheduleChoice("auto", "auto"), search_seconds=0.1)
    job = JobSpec(settings, ParallelSizes(4, 4), Batch(1, 8), StockLayers(16), model=LLAMA, flags=FLAGS)
    found = plan_job(job, Machine(300 * 2.0**30))
    assert "vocabulary parallelism would make the iteration" in found.plan.explanation
    assert "longer than it" not in found.plan.explanation, "a schedule by name would be shorter"
    assert _most(found) <= (1 - RESERVED) * 300 * 2**30


def test_schedules_by_name_are_judged_by_what_they_hold_themselves_not_by_the_layers_of_the_plan():
    """Megatron's recompute takes memory beside the limit, by the layers of each stage, of which plans have others."""
    settings = Settings(ScheduleChoice("auto", "auto"))
    recompute = StockRecompute("selective", modules=("mlp",))
    job = JobSpec(settings, ParallelSizes(4, 4), Batch(1, 8), StockLayers(16), recompute, model=LLAMA, flags=FLAGS)
    costs = costs_of(job)
    asked = Request("auto", 4, 8, costs, memory_limit=0.7, recompute_room=0.1, chunk_choices=(1, 2, 4))
    named = make_plan(replace(asked, schedule="zb-1p", memory_limit=None))
    found = Plan(asked, with_layers(replace(named.request, memory_limit=0.7), (4, 4, 4, 4)), named.schedule)
    best = min(named_within(asked), key=lambda line: line.makespan)
    assert f"within the limit is {best.schedule.name}," in found.explanation


def test_the_layers_of_a_schedule_by_name_that_auto_takes_are_settled():
    """Megatron divides only numbers that the stages divide, so the job's layout has to say where the layers are."""
    settings = Settings(ScheduleChoice("auto", "auto"), layers="auto")
    job = JobSpec(settings, ParallelSizes(3, 3), Batch(1, 8), StockLayers(16), model=LLAMA, flags=FLAGS)
    asked = request_of(job).request
    long = make_plan(replace(asked, schedule="1f1b", partition=False))
    taken = or_named(Plan(asked, replace(long.request, memory_limit=2.0), long.schedule, tuple(named_within(asked))))
    assert taken.schedule.name != "1f1b"
    layers = JobPlan(job, taken).layers
    assert (len(layers), sum(layers)) == (taken.schedule.placement.stages, 16)


FULL = StockRecompute("full", "uniform", 1)


@pytest.mark.parametrize(("recompute", "rival"), [(FULL, "1f1b"), (StockRecompute(), "v-min")], ids=["full", "none"])
def test_auto_fits_wherever_a_schedule_by_name_does(recompute: StockRecompute, rival: str):
    """Also where its search finds no room, since it counts peaks of different moments together."""
    named = plan_job(_llama(rival, recompute))
    found = plan_job(_llama("auto", recompute), Machine(_most(named) * (1 + 1e-9) / (1 - RESERVED)))
    assert found.too_much == 0
    assert _most(found) <= _most(named)


@pytest.mark.parametrize("recompute", [FULL, StockRecompute()], ids=["full", "none"])
def test_where_nothing_fits_auto_is_the_least_and_says_how_much_too_much_that_is(recompute: StockRecompute):
    device = 2.0**30
    found = plan_job(_llama("auto", recompute), Machine(device))
    assert found.too_much == pytest.approx(_most(found) - (1 - RESERVED) * device)
    assert all(_most(found) <= _most(plan_job(_llama(name, recompute))) for name in ("1f1b", "v-min", "v-half"))
    with pytest.raises(PlanError, match=r"^--pipeline-schedule auto: nothing fits: .* use more GPUs$"):
        check_fits(found)


def test_a_limit_to_measure_is_in_a_dry_run_what_the_device_leaves():
    job, device = _llama("auto", FULL, "auto"), 2.0**30
    dry = replace(job, settings=replace(job.settings, dry_run=DryRun(4, device)))
    unlimited = replace(dry, settings=replace(dry.settings, memory_limit=None))
    found, same = (plan_job(spec, Machine(device)) for spec in (dry, unlimited))
    assert found.plan == same.plan
    assert found.too_much == same.too_much > 0


def test_the_smallest_limit_that_is_named_works_and_a_smaller_one_is_refused():
    with pytest.raises(PlanError, match="is the smallest that works") as error:
        plan_job(_llama("auto", FULL, "0.001GiB"))
    smallest = re.search(r"(\S+)GiB is the smallest", str(error.value))
    assert smallest
    found = plan_job(_llama("auto", FULL, f"{smallest[1]}GiB"))
    held = max(rank.activations + rank.messages for rank in found.memory)
    assert 0.999 * float(smallest[1]) * 2**30 <= held <= float(smallest[1]) * 2**30
    with pytest.raises(PlanError, match="is the smallest that works"):
        plan_job(_llama("auto", FULL, f"{0.99 * float(smallest[1])}GiB"))


def _llama(name: str, recompute: StockRecompute, limit: str | None = None) -> JobSpec:
    settings = Settings(ScheduleChoice(name, name), memory_limit(FLAGS["memory_limit"], limit), search_seconds=0.1)
    return JobSpec(settings, ParallelSizes(4, 4), Batch(1, 8), StockLayers(16), recompute, model=LLAMA, flags=FLAGS)


def _most(job: JobPlan) -> float:
    """Memory of the rank that needs most, bytes."""
    return job.memory[job.worst].device
