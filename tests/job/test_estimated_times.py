"""Times of a job on a GPU by its name: told with how exact they are, and used where copies need them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.cli.options import FLAGS
from megatron.schedules.estimate.calibration import ERRORS
from megatron.schedules.estimate.devices import DEVICES, named
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.job_request import request_of
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import plan_job
from megatron.schedules.job.plan_summary import summary
from megatron.schedules.job.plans import job_plans
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import MemoryLimit, MemorySaving, ScheduleChoice
from megatron.schedules.utils.errors import PlanError, ShortMemoryError

H100 = Machine(gpu="NVIDIA H100 80GB HBM3")
SETTINGS = Settings(ScheduleChoice("v-half", "v-half"))
OFFLOADS = replace(
    SETTINGS,
    schedule=ScheduleChoice("adaptive", "adaptive"),
    memory_limit=MemoryLimit("0.5", fraction=0.5),
    saving=MemorySaving(offload=True),
)


def spec(settings: Settings = SETTINGS, model: str = "Llama-3-8B --num-layers 16") -> JobSpec:
    return job_plans([settings.schedule.name], [], settings, 4, 8, model, FLAGS).specs[0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("b200", "B200"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it(text: str, name: str | None):
    found = named(text)
    assert (None if found is None else found.name) == name


def test_a_job_on_a_known_gpu_says_its_time_and_how_exact_that_is():
    told, unknown = (summary(plan_job(spec(), machine)) for machine in (H100, Machine()))
    assert ERRORS in told and "on 4 H100-80GB the pipeline takes" in told
    assert ERRORS not in unknown
    # The plan is the same: it does not depend on the machine.
    assert told.splitlines()[:2] == unknown.splitlines()[:2]


def test_offload_uses_the_times_and_the_copies_of_a_known_gpu():
    unknown = replace(spec(), settings=OFFLOADS)
    with pytest.raises(PlanError, match="takes the time of copies from"):
        costs_of(unknown)
    with pytest.raises(PlanError, match="whose times are not known"):
        costs_of(replace(unknown, settings=replace(OFFLOADS, saving=MemorySaving(offload=True, gbps=25.0))))
    at = replace(unknown, gpu=H100.gpu)
    costs, held = costs_of(at), costs_of(spec()).in_bytes
    assert held is not None
    link = DEVICES["H100-80GB"].host_link
    assert costs.copies.time == pytest.approx(1e3 * held.of_rank(4) / 2 / link, rel=0.1)
    faster = costs_of(replace(at, settings=replace(OFFLOADS, saving=MemorySaving(offload=True, gbps=link / 5e8))))
    assert faster.copies.time == pytest.approx(costs.copies.time / 2)
    assert faster.layers == costs.layers


def test_parameters_that_alone_do_not_fit_are_named():
    settings = replace(SETTINGS, schedule=ScheduleChoice("auto", "auto"))
    with pytest.raises(ShortMemoryError, match="weights, gradients and optimizer state alone do not fit") as refused:
        request_of(spec(settings, "Llama-3-70B"), 16 * 2.0**30)
    assert "-model-parallel-size" in str(refused.value) and "-0" not in str(refused.value)
