"""Decides whether a job replans, and within which memory."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.planner.registry import AUTO, follows_costs, names_following_costs
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.errors import PlanError


def check_replan(settings: Settings) -> None:
    """Refuses replanning if no measurement can change the order.

    Raises:
        PlanError: the error names the flag.
    """
    name = settings.schedule.name
    if settings.replans and not follows_costs(name, shared_vocabulary=settings.vocabulary_parallel):
        raise PlanError(
            f"{FLAGS['replan']} with {FLAGS['schedule']} {name} would change nothing: its order does not "
            f"depend on costs; leave the flag out, or use one of {', '.join(names_following_costs())}"
        )


def replans_by_itself(spec: JobSpec, request: Request) -> bool:
    """Returns whether a job replans without a flag: ``auto`` does, until it has measured costs.

    Args:
        spec: the job.
        request: the request of its plan.
    """
    settings = spec.settings
    follows = follows_costs(request.schedule, shared_vocabulary=settings.vocabulary_parallel)
    return settings.schedule.name == AUTO and settings.costs is None and not settings.plan_lengths and follows


def with_room_for(running: Timeline, request: Request) -> Request:
    """Limits ``request`` of a job without a memory limit to the measured memory of its plan ``running``.

    Otherwise the replacement plan could be slower, only because passes use more memory than assumed.
    """
    if request.memory_limit is None:
        return request
    return replace(request, memory_limit=max(request.memory_limit, running.limit / request.ranks))
