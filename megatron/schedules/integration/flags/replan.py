"""Whether a job plans again while it runs, and the memory limit with which one begins that measures its own."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import Settings
from megatron.schedules.planner.adaptive import least_limit, placements
from megatron.schedules.planner.registry import follows_costs, names_following_costs
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError

# Of 1F1B's memory: what V-Min takes, the least with which ranks are busy at all.
_BEGINNING = 1 / 3


def check_replan(settings: Settings) -> None:
    """Refuse to plan again what nothing that is measured can change.

    Raises:
        PlanError: naming the flag.
    """
    name = settings.schedule.name
    if settings.replans and not follows_costs(name, shared_vocabulary=settings.vocabulary_parallel):
        raise PlanError(
            f"{FLAGS['replan']} with {FLAGS['schedule']} {name} would change nothing: its order does not "
            f"depend on costs; leave the flag out, or use one of {', '.join(names_following_costs())}"
        )


def with_first_limit(request: Request) -> Request:
    """``request`` within little memory, for a job whose limit is yet to be measured.

    Where the stages live is settled by the first plan. So the limit is one under which they may be anywhere.
    """
    least = max(least_limit(replace(request, placement=where)) for where in placements(request))
    return replace(request, memory_limit=max(_BEGINNING, least))
