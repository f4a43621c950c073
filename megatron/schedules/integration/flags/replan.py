"""Whether a job plans again while it runs, and the memory limit with which one begins that measures its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.vocabulary import shares
from megatron.schedules.planner.adaptive import least_limit, placements
from megatron.schedules.planner.registry import follows_costs, names_following_costs
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError

# Of 1F1B's memory: what V-Min takes, the least with which ranks are busy at all.
_BEGINNING = 1 / 3


def measures_limit(args: Any) -> bool:
    """Whether the memory limit is to come from what devices have left."""
    text = args.pipeline_memory_limit
    return text is not None and text.lower() == "auto"


def replans(args: Any) -> bool:
    """Whether the job plans again for what it measures."""
    return bool(args.pipeline_replan or measures_limit(args))


def check_replan(args: Any) -> None:
    """Refuse to plan again what nothing that is measured can change.

    Raises:
        PlanError: naming the flag.
    """
    name = args.pipeline_schedule
    if replans(args) and not follows_costs(name, shared_vocabulary=shares(args)):
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
