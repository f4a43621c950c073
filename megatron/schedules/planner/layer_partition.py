"""Searches for the layer partition with the shortest plan.

The local search moves one layer at a time. Lower bounds, first of all the time of the busiest rank, rule out most moves
without planning. The other moves are planned. Named schedules are planned as usual. ``adaptive`` searches for seconds,
so each move gets only a short climb from the best known order, and the best partition gets the full search. A
placement is dropped after that climb if its plans are clearly longer than another's. Effort is counted in passes, not
in time, so that the same request gives the same partition on all machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, permutations

from megatron.schedules.planner.adaptive import effort, expected_seconds, limit_in_microbatches, placements
from megatron.schedules.planner.partition_plans import (
    CLEARLY,
    Partition,
    Planned,
    few_microbatches,
    levelled,
    with_layers,
)
from megatron.schedules.planner.registry import Request, follows_costs, placement, plan, planned_makespan
from megatron.schedules.schedule.kinds import COMPUTING, Kind
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.polish import many_plans
from megatron.schedules.utils.cores import on_all_cores
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Parts, Progress, one_at_a_time, unheard

# Passes of all plans together, about ten seconds, and the overhead of each plan, in passes. A named schedule is planned
# in many rounds.
_EFFORT, _NAMED_EFFORT, _OVERHEAD = 600_000, 300_000, 2_000
_FEWEST_PLANS = 24
# Rounds of a climb that compares partitions, rounds of one that compares the best, and the number of these. Large
# plans get fewer rounds: each of their climbs schedules about this number of passes from each start.
_ROUNDS, _FINAL_ROUNDS, _FINALISTS = 40, 400, 8
_FEWEST_ROUNDS, _PASSES, _FINAL_PASSES = 16, 200_000, 1_250_000
# From a local optimum, so many random moves are made. Each has so many attempts to find a move whose bound is within
# this factor of the best plan. The full search may also gain this factor over a climb. It tries even layers only if
# climbs find them longer by at most the last factor.
_STEPS, _TRIES, _NEAR, _LEVEL = 2, 50, 1.01, 1.002
# Partitions one layer away from the even one compete for the effort of so many plans. The best then get one each.
_CONTEST = 6
# Python time for each stage of a bound, in passes that the compiled function schedules. All bounds may take this many
# times the effort of all plans.
_BOUND, _BOUNDS = 60, 4
# Approximate number of rounds in which a plan is polished.
_POLISHING = 30
# Number of moves from the even partition that are planned in the final check, by size of the problem. Only moves that
# their bound does not rule out count. Fewer are planned with more ranks than the last number.
_FEWEST_CHECKED, _MOST_CHECKED, _FULLY_CHECKED = 4, 64, 8
# Largest number of moves per partition. Partitions with more than about forty stages have more.
_MOST_MOVES = 1_600


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
    searches = [_Search(around_one, each) for each in _placements(around_one)]
    whole = _whole_search(around_one) * (1 + len(searches))
    parts = Parts(progress, sum(search.effort + search.checks for search in searches) + whole)
    # Most searches make about half of the plans they may make.
    with many_plans(sum(search.interpreted for search in searches) / 2):
        _climb(searches, parts.begin(sum(search.effort for search in searches)))
        shortest = _checked(_near(searches), parts.begin(sum(search.checks for search in searches)))
    best = placed(around_one, shortest.partition, (shortest.placement.chunks,), shortest.schedule)
    if request.schedule == "adaptive":
        placements = [search.placement for search in _near(searches) if search.even_within(_LEVEL * shortest.makespan)]
        even = _hopeful(around_one, best, shortest.makespan, placements)
        best = _shortest([replace(each, costs=request.costs) for each in (best, *even)], planned, parts.begin(whole))
    parts.end()
    return replace(best, costs=request.costs)


def _climb(searches: Sequence[_Search], progress: Progress) -> None:
    """Searches all placements, side by side; those that are clearly longer after the descent are dropped."""
    parts, progress = sum(search.effort for search in searches), one_at_a_time(progress)

    def hears(search: _Search) -> Progress:
        return lambda share: progress(share * search.effort / parts)

    on_all_cores([partial(search.descend, hears(search)) for search in searches])
    on_all_cores([partial(search.wander, hears(search)) for search in _near(searches)])


def _checked(searches: Sequence[_Search], progress: Progress) -> _Found:
    """Returns the best partition of all placements; the most promising placement is checked first."""
    parts, shortest = Parts(progress, sum(search.checks for search in searches)), None
    for search in sorted(_near(searches), key=lambda each: each.length):
        found = search.checked(parts.begin(search.checks), shortest.makespan if shortest else math.inf)
        shortest = min(shortest or found, found, key=lambda each: each.makespan)
    parts.end()
    assert shortest is not None
    return shortest


def _near(searches: Sequence[_Search]) -> list[_Search]:
    """Searches whose plan is not clearly longer than the shortest of all."""
    shortest = min(search.length for search in searches)
    return [search for search in searches if search.length <= CLEARLY * shortest]


def _whole_search(request: Request) -> float:
    """Effort of the full search of ``adaptive``, as :attr:`_Search.effort`; 0 for named schedules."""
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
        if fits and lower_bound(where, request.microbatches, on_stages, limit) < _NEAR * climbed:
            even.append(other)
    return even


def _shortest(
    requests: Sequence[Request], planned: Callable[[Request, Progress], Schedule], progress: Progress
) -> Request:
    """Returns the request with the shortest plan after a full search."""
    if len(requests) == 1:
        return requests[0]
    share = 1 / len(requests)

    def search(request: Request) -> Schedule:
        return planned(request, lambda part: progress(share * part))

    return min(requests, key=lambda request: planned_makespan(request, search))


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


@dataclass(frozen=True)
class _Found:
    partition: Partition
    placement: Placement
    makespan: float
    schedule: Schedule | None


class _Search:
    """Search on one placement."""

    def __init__(self, request: Request, where: Placement) -> None:
        self._request, self.placement, self._model = request, where, request.costs.model
        self._even = self._model.evenly(where.stages)
        self._climbs = request.schedule == "adaptive"
        self._limit = limit_in_microbatches(request) if self._climbs else math.inf
        self._bounds: dict[tuple[Partition, int], float] = {}
        # Time of F and of all computing of each stage, by its last layer and the number of its layers.
        self._times: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._stages = [where.stages_of(rank) for rank in range(where.ranks)]
        few = few_microbatches(request)
        self._planned = Planned(
            replace(request, microbatches=few), where, self._limit, _rounds(_ROUNDS, _PASSES, where, few)
        )
        # A named schedule is planned in one way only.
        alike = few == request.microbatches and not self._climbs
        final = _rounds(_FINAL_ROUNDS, _FINAL_PASSES, where, request.microbatches)
        self._whole = self._planned if alike else Planned(request, where, self._limit, final)
        self._most = max(_FEWEST_PLANS, self._plans_of(few))
        checked = self._plans_of(request.microbatches) * _FULLY_CHECKED // max(_FULLY_CHECKED, where.ranks)
        self._most_checked = min(_MOST_CHECKED, max(_FEWEST_CHECKED, checked))
        # Number of plans whose effort partitions one layer away from the even one may take.
        self._beside = _FINALISTS + _CONTEST if self._climbs else self._most_checked
        self._best, self.length = self._even, math.inf

    @property
    def effort(self) -> float:
        """Largest effort of all plans except the final checks, in passes that the compiled function schedules."""
        return self._most * self._planned.effort

    @property
    def checks(self) -> float:
        """Largest effort of the final checks, in the same unit."""
        return (1 + _FINALISTS + self._beside) * self._whole.effort

    @property
    def interpreted(self) -> float:
        """Passes that list scheduling places, in many rounds per plan if the order follows the costs."""
        searched = follows_costs(self._request.schedule, shared_vocabulary=False)
        return self._most * self._planned.size * _POLISHING if searched else 0.0

    def even_within(self, length: float) -> bool:
        """Checks that the plan with even layers is not longer than ``length``."""
        bound = self._bound(self._even, self._request.microbatches)
        return bound <= length and self._whole.makespan(self._even) <= length

    def descend(self, progress: Progress) -> None:
        """Descends from two start partitions until no move gains."""
        ends = [self._down(start, progress) for start in (self._even, levelled(self._model, self.placement))]
        self._best, self.length = min(ends, key=lambda each: each[1])

    def wander(self, progress: Progress) -> None:
        """Continues with random moves until all plans are used."""
        draw = random.Random(0)
        for _ in range(self._most):
            if self._spent:
                break
            other = self._best
            for _ in range(_STEPS):
                other = self._aside(other, _NEAR * self.length, draw)
            other, now = self._down(other, progress)
            if now < self.length - EPSILON:
                self._best, self.length = other, now

    @property
    def _spent(self) -> bool:
        """Returns True if no plan is left, or if the bounds took several times the effort of all plans."""
        bounds = len(self._bounds) * _BOUND * self.placement.stages
        return self._planned.count >= self._most or bounds > _BOUNDS * self.effort

    def _plans_of(self, microbatches: int) -> int:
        """Number of plans that the effort allows."""
        passes = _EFFORT if self._climbs else _NAMED_EFFORT
        return passes // (3 * self.placement.stages * microbatches + _OVERHEAD)

    def _aside(self, partition: Partition, length: float, draw: random.Random) -> Partition:
        """A random move of one layer that could lead below ``length``; ``partition`` if few can."""
        for _ in range(_TRIES):
            source, to = draw.sample(range(len(partition)), 2)
            other = _moved(partition, source, to)
            if partition[source] and self._bound(other, self._planned.microbatches) < length:
                return other
        return partition

    def _down(self, partition: Partition, progress: Progress) -> tuple[Partition, float]:
        length, gained = self._planned.makespan(partition), True
        while gained and not self._spent:
            gained = False
            for _, moved in self._shorter(partition, length, self._planned.microbatches):
                known = self._planned.count
                if known >= self._most:
                    break
                now = self._planned.makespan(moved)
                progress((self._planned.count - known) / self._most)
                if now < length - EPSILON:
                    partition, length, gained = moved, now, True
                    break
        return partition, length

    def checked(self, progress: Progress, shortest: float) -> _Found:
        """Shortest among the best partitions of the search, the even one, and those one layer away from it.

        All are planned as requested, or, for ``adaptive``, by longer climbs. Partitions that cannot be shorter than
        ``shortest``, the best of other placements, are left out.
        """
        whole, share = self._whole, 1 / (1 + _FINALISTS + self._beside)
        microbatches, best, length = self._request.microbatches, self._even, math.inf
        finalists = self._planned.shortest(_FINALISTS)
        # A named schedule may hold as many microbatches as its first plan does.
        for other in (*finalists, self._even) if self._climbs else (self._even, *finalists):
            hope = min(length, shortest) - EPSILON
            if not self._climbs or self._bound(other, microbatches) < hope:
                now = whole.makespan(other)
                if now < length:
                    best, length = other, now
            progress(share)
            if length > _NEAR * shortest:
                return _Found(best, self.placement, length, whole.schedule)
        least = min(length, shortest)
        others = [other for _, other in islice(self._shorter(self._even, least, microbatches), self._most_checked)]
        if self._climbs:
            others = whole.promising(others, _FINALISTS, _CONTEST, lambda part: progress(part * _CONTEST * share))
        for other in others:
            if self._bound(other, microbatches) < least - EPSILON and (now := whole.makespan(other)) < least - EPSILON:
                best, least, length = other, now, now
            progress(share)
        return _Found(best, self.placement, length, whole.schedule)

    def _shorter(self, partition: Partition, length: float, microbatches: int) -> Iterator[tuple[float, Partition]]:
        """Partitions with one layer moved that could be shorter than ``length``, after their bounds in ascending order.

        A bound takes much longer than the time of the busiest rank, which often is the bound. So it is computed only
        when its turn may have come.
        """
        waiting = [(max(self._busy(moved, microbatches)), moved) for moved in self._moves(partition, microbatches)]
        heapify(waiting)
        while waiting and waiting[0][0] < length - EPSILON:
            least, moved = heappop(waiting)
            bound = self._bound(moved, microbatches)
            if bound <= least + EPSILON:
                yield bound, moved
            else:
                heappush(waiting, (bound, moved))

    def _moves(self, partition: Partition, microbatches: int) -> list[Partition]:
        """Partitions with one layer moved; if these are too many, all from the busiest rank and a sample."""
        found = [move for move in permutations(range(len(partition)), 2) if partition[move[0]]]
        if len(found) > _MOST_MOVES:
            busy = self._busy(partition, microbatches)
            busiest = self._stages[busy.index(max(busy))]
            others = [move for move in found if move[0] not in busiest]
            found = [move for move in found if move[0] in busiest]
            found += random.Random(0).sample(others, min(len(others), _MOST_MOVES))
        return [_moved(partition, *move) for move in found]

    def _busy(self, partition: Partition, microbatches: int) -> list[float]:
        """Computing time of each rank, after the forwards that lead to its first one."""
        own = list(zip(accumulate(partition), partition, range(len(partition)), strict=True))
        if not all(map(self._times.__contains__, own)):
            times = with_layers(self._request, partition).costs_on(self.placement).times
            computing = (each for kind, each in times.items() if kind in COMPUTING)
            both = zip(times[Kind.F], map(sum, zip(*computing, strict=True)), strict=True)
            self._times.update(zip(own, both, strict=True))
        forwards, every = zip(*map(self._times.__getitem__, own), strict=True)
        heads = list(accumulate(forwards, initial=0.0))
        return [heads[stages[0]] + microbatches * sum(every[stage] for stage in stages) for stages in self._stages]

    def _bound(self, partition: Partition, microbatches: int) -> float:
        if (partition, microbatches) not in self._bounds:
            self._bounds[partition, microbatches] = self._bounded(partition, microbatches)
        return self._bounds[partition, microbatches]

    def _bounded(self, partition: Partition, microbatches: int) -> float:
        on_stages = with_layers(self._request, partition).costs_on(self.placement)
        limit = self._limit if self._limit == math.inf else max(self._limit, on_stages.least(self.placement))
        return lower_bound(self.placement, microbatches, on_stages, limit)


def _rounds(most: int, passes: int, where: Placement, microbatches: int) -> int:
    """Number of rounds that schedule at most ``passes`` passes."""
    return max(_FEWEST_ROUNDS, min(most, passes // (3 * where.stages * microbatches)))


def _moved(partition: Partition, source: int, to: int) -> Partition:
    moved = list(partition)
    moved[source] -= 1
    moved[to] += 1
    return tuple(moved)
