"""Searches for the layer partition with the shortest plan.

Each placement is searched by itself, see :mod:`.partition_search`, and dropped once its plans are clearly longer than
another's. The best partitions of those that are left are then planned as requested. ``adaptive`` searches for seconds,
so its best partitions compete in longer climbs, and only the best gets the full search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron.schedules.planner.adaptive import effort, expected_seconds, limit_in_microbatches, placements
from megatron.schedules.planner.partition_plans import (
    CLEARLY,
    Partition,
    plan_together,
    promising,
    with_layers,
)
from megatron.schedules.planner.partition_search import NEAR, Found, PartitionSearch
from megatron.schedules.planner.registry import Request, placement, plan, planned_makespan
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.polish import many_plans
from megatron.schedules.utils.cores import on_all_cores
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Parts, Progress, one_at_a_time, unheard

# The full search may gain the factor NEAR over a climb. It tries even layers only if climbs find them longer by at most
# this factor.
_LEVEL = 1.002
# The best partitions of all placements compete for the effort of so many plans. The best of them then get one each.
_CONTEST, _LAST = 6, 4


def partition_layers(
    request: Request, progress: Progress = unheard, planned: Callable[[Request, Progress], Schedule] = plan
) -> Request:
    """Returns ``request`` with the layer partition of the shortest plan found.

    ``adaptive`` gets the placement of that plan, too. The plan is never longer than with even layers. With up to about
    eight ranks it is never longer than with one layer moved from the even partition. For ``adaptive`` climbs decide:
    a full search of even layers is made only where these are about as short.

    Args:
        request: the request; its costs have a model.
        progress: receives the progress of the search.
        planned: plans a request with its partition settled, which a cache may then hold.

    Raises:
        PlanError: if no partition can be planned.
    """
    if request.costs.model.divisible:
        raise PlanError("layers can be placed where the model is known", "layers")
    # The rounding tolerance is for times around 1; costs may have any unit.
    around_one = request.around_one()
    searches = [PartitionSearch(around_one, each) for each in _placements(around_one)]
    whole = _whole_search(around_one) * (1 + len(searches))
    checks = sum(search.checks for search in searches)
    if request.schedule == "adaptive":
        checks += (_CONTEST + _LAST) * max(search.whole.effort for search in searches)
    parts = Parts(progress, sum(search.effort for search in searches) + checks + whole)
    # Most searches make about half of the plans they may make.
    with many_plans(sum(search.interpreted for search in searches) / 2):
        _climb(searches, parts.begin(sum(search.effort for search in searches)))
        shortest = _checked(_near(searches), parts.begin(checks))
    best = placed(around_one, shortest.partition, (shortest.placement.chunks,), shortest.schedule)
    if request.schedule == "adaptive":
        placements = [search.placement for search in _near(searches) if search.even_within(_LEVEL * shortest.makespan)]
        even = _hopeful(around_one, best, shortest.makespan, placements)
        best = _shortest([replace(each, costs=request.costs) for each in (best, *even)], planned, parts.begin(whole))
    parts.end()
    return replace(best, costs=request.costs)


def _climb(searches: Sequence[PartitionSearch], progress: Progress) -> None:
    """Searches all placements, side by side; those that are clearly longer after the descent are dropped."""
    parts, progress = sum(search.effort for search in searches), one_at_a_time(progress)

    def hears(search: PartitionSearch) -> Progress:
        return lambda share: progress(share * search.effort / parts)

    on_all_cores([partial(search.descend, hears(search)) for search in searches])
    on_all_cores([partial(search.wander, hears(search)) for search in _near(searches)])
    on_all_cores([partial(search.refine, hears(search)) for search in _near(searches)])


def _checked(searches: Sequence[PartitionSearch], progress: Progress) -> Found:
    """Returns the best partition of all placements, each planned as requested, or, for ``adaptive``, climbed longer."""
    near = sorted(_near(searches), key=lambda search: search.length)
    return near[0].planned(progress) if near[0].named else _raced(near, progress)


def _raced(searches: Sequence[PartitionSearch], progress: Progress) -> Found:
    """Returns the best partition after a contest of the best of all placements, with those beside the even ones.

    The best partition of each placement gets a climb before, and the best of the contest get one each afterwards.
    """
    share = 1 / (len(searches) + _CONTEST + _LAST)
    plan_together([(search.whole, search.best) for search in searches])
    progress(len(searches) * share)
    shortest = min(search.found.makespan for search in searches)
    near = [search for search in searches if search.found.makespan <= NEAR * shortest]
    fields = [(search.whole, search.candidates(shortest)) for search in near]
    best = promising(fields, _LAST, _CONTEST, lambda part: progress(part * _CONTEST * share))
    plan_together(best)
    progress(_LAST * share)
    return min((search.found for search in near), key=lambda found: found.makespan)


def _near(searches: Sequence[PartitionSearch]) -> list[PartitionSearch]:
    """Searches whose plan is not clearly longer than the shortest of all."""
    shortest = min(search.length for search in searches)
    return [search for search in searches if search.length <= CLEARLY * shortest]


def _whole_search(request: Request) -> float:
    """Effort of the full search of ``adaptive``, as :attr:`PartitionSearch.effort`; 0 for named schedules."""
    return effort(request.ranks, expected_seconds(request)) if request.schedule == "adaptive" else 0.0


def _hopeful(request: Request, found: Request, climbed: float, placements: Sequence[Placement]) -> list[Request]:
    """Returns ``request`` with even layers on each placement where a full search might be shorter than ``found``.

    Args:
        request: the request as it was made.
        found: the request with its partition settled.
        climbed: makespan of a climb's plan for ``found``.
        placements: placements where even layers were not clearly longer after a climb.
    """
    model = request.costs.model
    even = []
    for where in placements:
        other = placed(request, model.evenly(where.stages), (where.chunks,))
        on_stages, limit = other.costs_on(where), limit_in_microbatches(found)
        fits = on_stages.least(where) <= limit + EPSILON
        if fits and lower_bound(where, request.microbatches, on_stages, limit) < NEAR * climbed:
            even.append(other)
    return even


def _shortest(
    requests: Sequence[Request], planned: Callable[[Request, Progress], Schedule], progress: Progress
) -> Request:
    """Returns the request with the shortest plan after full searches, which run side by side."""
    if len(requests) == 1:
        return requests[0]
    share, progress = 1 / len(requests), one_at_a_time(progress)

    def search(request: Request) -> Schedule:
        return planned(request, lambda part: progress(share * part))

    makespans = on_all_cores([partial(planned_makespan, request, search) for request in requests])
    return requests[makespans.index(min(makespans))]


def placed(
    request: Request, partition: Partition, chunk_choices: tuple[int, ...], start: Schedule | None = None
) -> Request:
    """Returns ``request`` with ``partition`` settled.

    For ``adaptive`` it has these numbers of chunks, too, and starts from ``start``.
    """
    request = with_layers(request, partition)
    return replace(request, chunk_choices=chunk_choices, start=start) if request.schedule == "adaptive" else request


def _placements(request: Request) -> list[Placement]:
    if request.schedule == "adaptive":
        return placements(request)
    known = placement(request)
    assert known is not None
    return [known]


def as_layout(partition: Partition, ahead: int = 0) -> str:
    """Returns ``partition`` in the format of Megatron's ``--pipeline-model-parallel-layout``, in model order.

    Args:
        partition: layers of each stage.
        ahead: layers of multi-token prediction, on the last stage.
    """
    stages = ["t" * count for count in partition]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * ahead + "L"
    return "|".join(stages)
