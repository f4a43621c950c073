"""In a job one rank plans, and all others get its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec, Settings, StockLayers
from megatron.schedules.job.values import MemoryLimit, ScheduleChoice
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.server import Megatron
from tests.tiers import by_night

CHOICE = ScheduleChoice("adaptive", "adaptive")


def _planned(limit: float, groups: bool) -> tuple[int, str, str, int]:
    """Number of plans made by this rank, and the plans for 8 and for 12 microbatches."""
    import torch.distributed as dist

    from megatron.schedules.integration import shared_plan

    made: list[Request] = []

    def make(request: Request) -> Plan:
        made.append(request)
        return make_plan(request)

    shared_plan.made = make
    if groups:
        dist.init_process_group("gloo")
    settings = Settings(CHOICE, MemoryLimit(str(limit), limit), search_seconds=0.01)
    plans = shared_plan.SharedPlans()
    job = plans.job(JobSpec(settings, ParallelSizes(4, 4), layers=StockLayers(16), microbatches=8, flags=FLAGS))
    later = plans.planner(job).schedule(12)
    if not groups:
        dist.init_process_group("gloo")  # with the same server
    dist.barrier()
    return len(made), to_csv(job.schedule), to_csv(later), len(job.programs)


@pytest.mark.job
@pytest.mark.parametrize(("world", "groups"), [(4, True), (16, False), by_night(64, False)])
def test_one_rank_of_a_job_searches(megatron: Megatron, world: int, groups: bool) -> None:
    found = megatron("on_ranks", world, _planned, 0.6, groups)
    assert [number for number, *_ in found] == [2] + [0] * (world - 1)
    assert len({tuple(plans) for _, *plans in found}) == 1
    assert found[0][1] == to_csv(make_plan(_request(0.6)).schedule)


@pytest.mark.job
def test_what_the_first_rank_refuses_all_end_for_in_one_line(megatron: Megatron) -> None:
    with pytest.raises(AssertionError) as raised:
        megatron("on_ranks", 4, _planned, 0.01, False)
    said = str(raised.value)
    assert said.count("error: ") == 1 and "--pipeline-memory-limit: a memory limit of 0.01" in said
    assert "Traceback" not in said


def _request(limit: float) -> Request:
    asked = Request("adaptive", 4, 8, memory_limit=limit, search_seconds=0.01)
    return replace(asked, chunk_choices=(1, 2, 4))
