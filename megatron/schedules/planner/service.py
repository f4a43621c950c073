"""Plans a request: first the layer partition, then recompute and offload, then the schedule.

``auto`` returns the plan with the shortest iteration time within the memory limit. It compares ``adaptive``, with a
search for everything that the request leaves open, with the named schedules.

Results of searches are cached on disk, see :mod:`.plan_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.schedules.planner.adaptive import bound, expected_seconds, least_limit, placements, search_seconds
from megatron.schedules.planner.explanation import explanation
from megatron.schedules.planner.partition_plans import with_layers
from megatron.schedules.planner.partition_search import searches
from megatron.schedules.planner.plan_cache import cached_partition, cached_plan, cached_saving
from megatron.schedules.planner.plan_json import PlanForm, to_text
from megatron.schedules.planner.registry import AUTO, named_within, with_own_saving
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.search.polish import many_plans
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Parts, Progress, unheard

# Seconds on a typical core: for all searches of auto together, the minimum for each search, and for a layer partition
# on one placement in addition to full searches.
_AUTO_SECONDS, _LEAST_SECONDS, _PARTITION_SECONDS = 40.0, 2.0, 10.0
# Largest memory of a rank that auto searches with, as a fraction of 1F1B's. With more memory, searches take longer and
# do not find shorter plans.
_ENOUGH = 1.0
# A schedule by name within this factor of the searched plan may be shorter with a layer partition of its own, which is
# found much faster.
_NEAR = 1.05
# Share of the work of auto that the layer partition of that schedule takes at most.
_BY_NAME = 0.15
# Iteration times with a smaller relative difference count as equal.
_ROUNDING = 1e-9
# Vocabulary parallelism is tried if ranks idle for at least this share of the time, and ranks x microbatches is at most
# this number. The plan for that gets so many seconds: only whole per cents of its gain are shown.
_LEAST_IDLE, _MOST_TRIED, _TRIAL_SECONDS = 0.02, 4096, 0.5


@dataclass(frozen=True)
class Plan:
    """A schedule with the request it was planned for.

    Args:
        asked: the request as it was made.
        request: the request with layer partition, recompute and offload settled.
        schedule: order of the passes.
        named: timelines of all named schedules at this size, if they were planned for a comparison.
    """

    asked: Request
    request: Request
    schedule: Schedule
    named: tuple[Timeline, ...] = field(default=(), compare=False, repr=False)

    @property
    def explanation(self) -> str:
        """A few lines that compare schedule, memory and iteration time with the named schedules."""
        named = self.named or named_within(replace(self.asked, memory_limit=None))
        return explanation(self.timeline, self.request, named, self.peak_bytes, self.vocabulary_gain)

    @cached_property
    def vocabulary_gain(self) -> float | None:
        """Share of the iteration time that vocabulary parallelism would save, from a quick plan; None if unknown."""
        request, costs = self.asked, self.asked.costs
        passes = request.ranks * request.microbatches
        if costs.model.divisible or costs.model.shared_vocabulary or self.bubble < _LEAST_IDLE or passes > _MOST_TRIED:
            return None
        layers, ranks = len(costs.model.layers), request.ranks
        shared = replace(
            request,
            schedule="adaptive",
            # Without the output layer, even layers are as good as a searched partition, if all stages get equally many.
            chunk_choices=(max((c for c in request.chunk_choices if layers % (c * ranks) == 0), default=1),),
            costs=replace(costs, model=replace(costs.model, shared_vocabulary=True), memory=costs.in_shares),
            memory_limit=self.request.memory_limit,
            search_seconds=_TRIAL_SECONDS,
            start=None,
            partition=False,
            recompute=False,
            offload=False,
        )
        try:
            return 1 - make_plan(shared).iteration_time / self.iteration_time
        except PlanError:  # the model does not allow it, or the limit is too small without recompute or offload
            return None

    @property
    def decisions(self) -> Decisions:
        """Layers, recompute and offload of each stage."""
        return self.request.decisions

    @cached_property
    def costs(self) -> StageCosts:
        """Costs of each stage that the plan was made for."""
        return self.request.costs_on(self.schedule.placement)

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of each pass, in the unit of the costs."""
        return simulate(self.schedule, self.costs)

    @property
    def iteration_time(self) -> float:
        """Time from 0 to the end of the last pass on any rank (makespan), in the unit of the costs."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """Share of the iteration time in which an average rank is idle."""
        return self.timeline.bubble

    @property
    def peak_memory(self) -> float:
        """Peak activation memory of the worst rank, as a fraction of 1F1B's."""
        return self.timeline.peak / self.schedule.ranks

    @property
    def peak_bytes(self) -> float | None:
        """Peak activation memory of the worst rank, bytes; None if the sizes of the model are unknown."""
        return self.request.peak_bytes(self.timeline)

    @cached_property
    def lower_bound(self) -> float | None:
        """Lower bound of the iteration time within the memory limit, in the unit of the costs; None without a limit."""
        return bound(self.request) if self.request.schedule == "adaptive" else None

    def to_csv(self) -> str:
        """Returns the order of the passes in the CSV format of torch.distributed.pipelining, one row per rank."""
        return to_csv(self.schedule)

    def to_json(self) -> str:
        """Returns the plan as JSON, with its costs and figures; see docs/plan-json.md."""
        return to_text(PlanForm.of(self.timeline, self.asked, self.request, self.lower_bound)) + "\n"


def make_plan(asked: Request, progress: Progress = unheard) -> Plan:
    """Plans a request.

    Raises:
        PlanError: one line that says what is wrong with the request, or why it has no plan.
    """
    if asked.schedule == AUTO:
        return _shortest(asked, progress)
    if not (asked.partition and (asked.recompute or asked.offload)):
        return _settled(asked, progress)
    parts, found = Parts(progress, 2), None
    # The layer partition is searched without recompute and offload. Where memory is so scarce that they are used, even
    # layers may be better, or all that fits.
    with suppress(PlanError):
        found = _settled(asked, parts.begin(1))
    if found is None or any(found.decisions.mean_savings.values()):
        try:
            even = _settled(replace(asked, partition=False), parts.begin(1))
        except PlanError:
            if found is None:
                raise
        else:
            layers = even.request.layers_on(even.schedule.placement)
            assert layers is not None, "the model is known"
            if found is None or even.iteration_time < (1 - _ROUNDING) * found.iteration_time:
                found = replace(even, asked=asked, request=with_layers(even.request, layers))
    parts.end()
    return found


def _settled(asked: Request, progress: Progress) -> Plan:
    """Settles one decision after the other."""
    request, seconds = with_own_saving(asked), expected_seconds(asked)
    steps = _searches(asked, seconds)
    parts = Parts(progress, sum(each for _, each in steps) + seconds)
    for search, each in steps:
        request = search(request, parts.begin(each))
    schedule = cached_plan(request, parts.begin(seconds))
    parts.end()
    return Plan(asked, request, schedule)


def _shortest(asked: Request, progress: Progress) -> Plan:
    """Plans ``auto``: returns the searched plan, or a named schedule within the same limit that is shorter."""
    limit, request = _searched(asked)
    parts = Parts(progress, 1.0)
    found = replace(make_plan(request, parts.begin(1 - _BY_NAME)), asked=asked)
    found = replace(found, request=replace(found.request, memory_limit=limit))
    with many_plans(math.inf):  # the compiled code is loaded anyway
        named = tuple(named_within(replace(asked, memory_limit=None)))
    best = or_named(replace(found, named=named), parts.begin(_BY_NAME))
    parts.end()
    return best


def _searched(asked: Request) -> tuple[float, Request]:
    """The memory limit of ``auto``, and its request for ``adaptive``."""
    limit = 1.0 if asked.memory_limit is None else asked.memory_limit
    request = replace(asked, schedule="adaptive", memory_limit=limit)
    request = replace(request, memory_limit=min(limit, max(_enough(request), least_limit(request))))
    if asked.search_seconds is None:
        fixed, each = (sum(taken for _, taken in _searches(request, seconds)) for seconds in (0.0, 1.0))
        share = max(_LEAST_SECONDS, (_AUTO_SECONDS - fixed) / (1 + each - fixed))
        request = replace(request, search_seconds=min(search_seconds(request), share))
    return limit, request


def planning_seconds(asked: Request) -> float:
    """Time that :func:`make_plan` is expected to take for ``auto`` or ``adaptive``, in seconds on one core.

    Raises:
        PlanError: see :func:`make_plan`.
    """
    request = _searched(asked)[1] if asked.schedule == AUTO else asked
    seconds = expected_seconds(request)
    steps = _searches(replace(request, partition=False), seconds)
    # A layer partition takes about as long for one placement as for all: most are dropped early.
    placing = searches(request.costs.model) * _PARTITION_SECONDS + seconds
    return seconds + sum(each for _, each in steps) + request.partition * placing


def or_named(found: Plan, progress: Progress = unheard) -> Plan:
    """Returns a plan of ``auto``, or the shortest of its named schedules within the same limit if that is shorter.

    The layers of that schedule are even, or partitioned for it. One that is a little longer with even layers is
    partitioned too.
    """
    request = replace(found.asked, memory_limit=found.request.memory_limit)
    fitting = filter(request.allows, found.named)
    near = [line for line in fitting if line.makespan < _NEAR * found.iteration_time]
    if not near:
        return found
    best = min(near, key=lambda line: line.makespan)
    plans = [found, by_name(found, best)] if best.makespan < (1 - _ROUNDING) * found.iteration_time else [found]
    if request.partition and request.layers_on(best.schedule.placement) is not None:
        placed = replace(_settled(_under(request, best), progress), asked=found.asked, named=found.named)
        plans += [placed] if request.allows(placed.timeline) else []
    return min(plans, key=lambda plan: plan.iteration_time)


def by_name(found: Plan, line: Timeline) -> Plan:
    """Returns the schedule by name in ``line``, one of those of a plan of ``auto``, with even layers as a plan."""
    named = _under(replace(found.asked, memory_limit=found.request.memory_limit), line)
    layers = named.layers_on(line.schedule.placement) if named.partition else None
    return Plan(found.asked, named if layers is None else with_layers(named, layers), line.schedule, found.named)


def _under(request: Request, line: Timeline) -> Request:
    """Returns the request for the schedule by name in ``line``."""
    chunks = line.schedule.placement.chunks
    return replace(request, schedule=line.schedule.name, chunks=chunks, recompute=False, offload=False)


def _enough(request: Request) -> float:
    """Memory limit with which each rank may hold :data:`_ENOUGH`, also beside more parameters than others have."""
    everywhere = [_ENOUGH * request.ranks] * request.ranks
    return max(request.costs_on(where).within(where, everywhere) for where in placements(request)) / request.ranks


_Search = Callable[[Request, Progress], Request]


def _searches(asked: Request, seconds: float) -> list[tuple[_Search, float]]:
    """Searches to run before the schedule search of so many ``seconds``, each with its approximate time in seconds."""
    found: list[tuple[_Search, float]] = []
    if asked.partition:
        placed = len(asked.chunk_choices) if asked.schedule == "adaptive" else 1
        # The best partition found, and even layers on each placement, each get a full search.
        whole = (1 + placed) * seconds if asked.schedule == "adaptive" else 0.0
        found.append((cached_partition, placed * _PARTITION_SECONDS + whole))
    if asked.recompute or asked.offload:
        # If both are allowed, recompute alone, offload alone, both and neither are compared.
        found.append((cached_saving, seconds * (8 if asked.recompute and asked.offload else 3)))
    return found
