"""The one way from a request to a plan: layer partition, then recompute and offload, then the schedule.

``auto`` is the shortest plan of all within the memory limit: what ``adaptive`` finds with everything searched that the
request leaves open, or a schedule by name where that is shorter.

What takes long is found once only for an equal request, see :mod:`.plan_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.schedules.planner.adaptive import bound, least_limit, search_seconds
from megatron.schedules.planner.explanation import explanation
from megatron.schedules.planner.plan_cache import cached_partition, cached_plan, cached_saving
from megatron.schedules.planner.plan_json import PlanForm, to_text
from megatron.schedules.planner.registry import AUTO, named_within, with_own_saving
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_memory import activation_bytes
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.utils.progress import Parts, Progress, unheard

# In seconds of a usual core: what all searches of auto take together, about, and the least that each of them has.
_AUTO_SECONDS, _LEAST_SECONDS = 40.0, 2.0
# Of 1F1B's activation memory: as much as auto searches for.
_ENOUGH = 1.0
# What a layer partition takes on each placement beside whole searches, in the same unit.
_PARTITION_SECONDS = 10.0
# Plans whose times differ by less are as long as one another.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Plan:
    """The answer to a request.

    Args:
        asked: the request as it was made.
        request: the same with all that was to be searched settled.
        schedule: the order of the passes.
    """

    asked: Request
    request: Request
    schedule: Schedule

    @property
    def explanation(self) -> str:
        """What was chosen, what it holds and how long it is beside others: a few lines."""
        return explanation(self.timeline, self.request, self.asked)

    @property
    def decisions(self) -> Decisions:
        """What is settled about the stages."""
        return self.request.decisions

    @cached_property
    def costs(self) -> StageCosts:
        """What the stages cost, by which the plan was made."""
        return self.request.costs_on(self.schedule.placement)

    @cached_property
    def timeline(self) -> Timeline:
        """When each pass starts and ends."""
        return simulate(self.schedule, self.costs)

    @property
    def iteration_time(self) -> float:
        """Time from 0 to the last end on any rank (makespan), in the unit of the costs."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The part of the iteration time in which an average rank computes nothing."""
        return self.timeline.bubble

    @property
    def peak_memory(self) -> float:
        """Peak activation memory of the worst rank, as a fraction of 1F1B's."""
        return self.timeline.peak / self.schedule.ranks

    @property
    def peak_bytes(self) -> float | None:
        """Peak activation memory of the worst rank in bytes; None where the model's sizes are not known."""
        memory, counts = self.request.costs.memory, self.request.layers_on(self.schedule.placement)
        if memory is None or counts is None:
            return None
        return max(activation_bytes(self.schedule, self.costs, memory, counts))

    @cached_property
    def lower_bound(self) -> float | None:
        """No schedule within the memory limit has a shorter iteration; None where there was no limit."""
        return bound(self.request) if self.request.schedule == "adaptive" else None

    def to_csv(self) -> str:
        """The order of the passes, a row for each rank, as torch.distributed.pipelining reads it."""
        return to_csv(self.schedule)

    def to_json(self) -> str:
        """All that the plan's times, memory and bubble follow from, see docs/plan-json.md."""
        return to_text(PlanForm.of(self.timeline, self.asked, self.request, self.lower_bound)) + "\n"


def make_plan(asked: Request, progress: Progress = unheard) -> Plan:
    """The plan for ``asked``.

    Args:
        asked: what is asked for.
        progress: hears how far the planning is, whatever it consists of.

    Raises:
        PlanError: in one line, what is wrong with the request or why there is no such plan.
    """
    if asked.schedule == AUTO:
        return _shortest(asked, progress)
    request, seconds = with_own_saving(asked), search_seconds(asked)
    steps = _searches(asked, seconds)
    parts = Parts(progress, sum(each for _, each in steps) + seconds)
    for search, each in steps:
        request = search(request, parts.begin(each))
    schedule = cached_plan(request, parts.begin(seconds))
    parts.end()
    return Plan(asked, request, schedule)


def _shortest(asked: Request, progress: Progress) -> Plan:
    """What is searched for, or a schedule by name within the same memory that is shorter."""
    limit = 1.0 if asked.memory_limit is None else asked.memory_limit
    # Within 1F1B's memory ranks need hardly idle. More of it makes the search longer rather than its plans shorter.
    request = replace(asked, schedule="adaptive", memory_limit=limit)
    request = replace(request, memory_limit=min(limit, max(_ENOUGH, least_limit(request))))
    if asked.search_seconds is None:
        fixed, each = (sum(taken for _, taken in _searches(request, seconds)) for seconds in (0.0, 1.0))
        share = max(_LEAST_SECONDS, (_AUTO_SECONDS - fixed) / (1 + each - fixed))
        request = replace(request, search_seconds=min(search_seconds(request), share))
    found = replace(make_plan(request, progress), asked=asked)
    found = replace(found, request=replace(found.request, memory_limit=limit))
    request = replace(request, memory_limit=limit)
    fitting = [line for line in named_within(request) if line.makespan < (1 - _ROUNDING) * found.iteration_time]
    if not fitting:
        return found
    best = min(fitting, key=lambda line: line.makespan).schedule
    name, chunks = best.name, best.placement.chunks
    settled = replace(request, schedule=name, chunks=chunks, partition=False, recompute=False, offload=False)
    return Plan(asked, settled, best)


_Search = Callable[[Request, Progress], Request]


def _searches(asked: Request, seconds: float) -> list[tuple[_Search, float]]:
    """What is to be searched before the schedule, in this order, and the seconds that each takes, about.

    Args:
        asked: says what.
        seconds: of one whole search of a schedule.
    """
    found: list[tuple[_Search, float]] = []
    if asked.partition:
        placed = len(asked.chunk_choices) if asked.schedule == "adaptive" else 1
        # The whole search is made of what was found and of even layers on each placement.
        whole = (1 + placed) * seconds if asked.schedule == "adaptive" else 0.0
        found.append((cached_partition, placed * _PARTITION_SECONDS + whole))
    if asked.recompute or asked.offload:
        # Each alone, both together and neither are compared where both are allowed.
        found.append((cached_saving, seconds * (8 if asked.recompute and asked.offload else 3)))
    return found
