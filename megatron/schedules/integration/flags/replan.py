"""Whether a job plans again while it runs, and the first memory limit of a job that measures its own."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.planner.adaptive import least_limit, placements
from megatron.schedules.planner.registry import AUTO, follows_costs, names_following_costs
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.errors import PlanError

# Of 1F1B's memory: what V-Min takes, the least with which ranks are busy at all.
_BEGINNING = 1 / 3


def check_replan(settings: Settings) -> None:
    """Refuses to plan again where nothing that is measured can change the order.

    Raises:
        PlanError: naming the flag.
    """
    name = settings.schedule.name
    if settings.replans and not follows_costs(name, shared_vocabulary=settings.vocabulary_parallel):
        raise PlanError(
            f"{FLAGS['replan']} with {FLAGS['schedule']} {name} would change nothing: its order does not "
            f"depend on costs; leave the flag out, or use one of {', '.join(names_following_costs())}"
        )


def replans_by_itself(spec: JobSpec, request: Request) -> bool:
    """Whether a job plans again without a flag: ``auto``, as long as it knows no measured costs.

    Args:
        spec: the job.
        request: that its plan answers.
    """
    settings = spec.settings
    follows = follows_costs(request.schedule, shared_vocabulary=settings.vocabulary_parallel)
    return settings.schedule.name == AUTO and settings.costs is None and not settings.plan_lengths and follows


def with_room_for(running: Timeline, request: Request) -> Request:
    """``request`` of a job without a memory limit of its own: ``running``, its plan as measured, stays within memory.

    Otherwise a plan could be replaced by a longer one, only because passes hold more than was assumed.
    """
    if request.memory_limit is None:
        return request
    return replace(request, memory_limit=max(request.memory_limit, running.limit / request.ranks))


def with_first_limit(request: Request) -> Request:
    """``request`` within little memory, for a job whose limit is yet to be measured.

    Where the stages live is settled by the first plan. So the limit is one under which they may be anywhere.
    """
    least = max(least_limit(replace(request, placement=where)) for where in placements(request))
    return replace(request, memory_limit=max(_BEGINNING, least))
