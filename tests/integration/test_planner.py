"""What a job says of its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.flags.declared import FLAGS, stock_parser
from megatron.schedules.job.auto_choices import auto_choices
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.plan_summary import summary
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.planner.replanning import propose, with_room_for
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.simulator import simulate
from tests.integration.dry_runs import job_of

LLAMA = """--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 14336 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 16 --vocab-size 128256
    --bf16 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --pipeline-model-parallel-size 8
    --pipeline-schedule adaptive"""


def first_line(request: Request) -> str:
    spec = JobSpec(Settings(ScheduleChoice(request.schedule, request.schedule)), ParallelSizes(4, 4))
    return summary(JobPlan(spec, make_plan(request))).splitlines()[0]


def test_a_schedule_by_name_is_named():
    said = first_line(Request("v-half", 4, 8))
    assert said == (
        "pipeline schedule: v-half, 4 ranks, 8 microbatches, planned bubble 9.4 %, "
        "planned peak activation memory 75.0 % of 1F1B's, and 6 messages at most"
    )


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(0.5, "v-min"), (0.7, "adaptive")],
    ids=["one with a name", "one of its own"],
)
def test_of_adaptive_both_the_limit_and_what_was_chosen_are_named(limit: float, chosen: str):
    """Within half the memory of 1F1B nothing that is found in so little time is shorter than V-Min."""
    costs = Costs() if chosen == "v-min" else Costs.of(1, 1.1, 0.75, 0.05)
    request = Request("adaptive", 4, 8, costs, memory_limit=limit, search_seconds=0.001, chunk_choices=(2,))
    assert plan(request).name == chosen
    named = "adaptive" if chosen == "adaptive" else f"adaptive: {chosen}"
    assert first_line(request).startswith(f"pipeline schedule: {named}, within {limit} of 1F1B's memory, 4 ranks")


@pytest.mark.parametrize("more", ["", "--recompute-granularity selective", "--pipeline-save-memory recompute"])
def test_activations_and_messages_of_a_large_model_are_within_a_limit_in_gib(more: str):
    """Of Llama-3-8B, planned by the flags alone: on a rank of some plans there are more messages than were expected."""
    limit = 40 if not more else 20
    flags = f"{LLAMA} --pipeline-memory-limit {limit}GiB {more}"
    args = stock_parser().parse_args(flags.split())
    args.world_size = args.pipeline_model_parallel_size
    asked = job_of(args)
    ranks = asked.memory
    assert max(rank.activations + rank.messages for rank in ranks) <= limit * 2**30
    assert max(rank.activations for rank in ranks) >= 0.5 * limit * 2**30, "the limit is made use of"


def test_without_a_limit_of_its_own_a_job_never_plans_again_for_a_longer_plan():
    """What was assumed to fit into half the memory is 1F1B's in full, as measured; what runs may go on."""
    running = simulate(plan(Request("1f1b", 4, 8)), Request("1f1b", 4, 8).costs_on(sequential(4)))
    request = Request("adaptive", 4, 8, memory_limit=0.5, search_seconds=0.01, chunk_choices=(1,))
    limited, free = propose(request, running.schedule), propose(with_room_for(running, request), running.schedule)
    assert limited.after.makespan > limited.before.makespan
    assert free.after.makespan <= free.before.makespan
    assert with_room_for(running, replace(request, memory_limit=2.0)).memory_limit == 2.0


def test_auto_tries_no_choice_twice():
    """Of a model that is not known nothing can be chosen."""
    spec = JobSpec(Settings(ScheduleChoice("auto", "auto")), ParallelSizes(2, 2), flags=FLAGS)
    assert list(auto_choices(spec)) == [spec]
