"""Jobs that save memory by flag: stock's gradients to the bit, in less memory, and a line about what was planned."""

from __future__ import annotations

import re

import pytest

from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import plan_job
from megatron.schedules.job.spec import Batch, JobModel, JobSpec, Settings, StockLayers
from megatron.schedules.job.values import CostsChoice, MemoryLimit, MemorySaving, ScheduleChoice
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from tests.integration.results import UNTIED
from tests.integration.test_same_result import assert_same_losses, differing
from tests.tiers import by_night

JOB = (*UNTIED, "--global-batch-size", "8", "--train-iters", "2", "--pipeline-model-parallel-size", "4")
LIMIT = "--pipeline-schedule adaptive:2"
HOW = {
    "recompute": "--pipeline-memory-limit 0.3 --pipeline-save-memory recompute",
    "offload": "--pipeline-memory-limit 0.3 --pipeline-save-memory offload=0.1 --pipeline-costs 4,4,3",
    "both": "--pipeline-memory-limit 0.2 --pipeline-save-memory both=0.1 --pipeline-costs 4,4,3",
}


@pytest.mark.parametrize("how", HOW)
def test_a_job_that_saves_memory_has_stocks_gradients(train, how):
    ours = train(4, *JOB, *LIMIT.split(), *HOW[how].split())
    stock = train.stock(4, *JOB)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize("how", ["recompute", by_night("offload")])
def test_the_first_lines_say_what_is_recomputed_or_offloaded(megatron, how):
    from tests.integration.test_refusals import JOB as ONE
    from tests.integration.test_refusals import PP4

    (_, said), *_ = megatron("outputs", 4, [*ONE, *PP4, *LIMIT.split(), *HOW[how].split()])
    expected = "% of the layers recomputed" if how == "recompute" else "GiB of each rank's at most on the host"
    assert expected in said


def test_a_host_without_memory_is_told_before_the_start():
    settings = Settings(
        ScheduleChoice("adaptive", "adaptive"),
        MemoryLimit("0.3", 0.3),
        CostsChoice("1,1,1", Costs()),
        saving=MemorySaving(offload=True, gbps=1e6),
        search_seconds=0.01,
    )
    model = JobModel(MODELS["9.6B"].whole, Numbers(2, 4, 12))
    job = JobSpec(settings, ParallelSizes(2, 2), Batch(1, 8), StockLayers(30), model=model, flags=FLAGS)
    said = re.search(r"offloaded, ([\d.]+) GiB of each rank's at most on the host", plan_job(job).assumed)
    assert said is not None
    taken = float(said[1]) * 2**30
    assert plan_job(job, Machine(host=2.1 * taken, ranks_on_host=2)).assumed
    refused = rf"-memory offload takes {taken / 2**30:.1f} GiB of host memory for each of 2 ranks"
    with pytest.raises(PlanError, match=refused):
        plan_job(job, Machine(host=1.9 * taken, ranks_on_host=2))
