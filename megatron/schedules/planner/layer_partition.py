"""Which stage has how many layers: the partition whose plan is the shortest.

A local search that moves one layer at a time. What bounds a plan from below, its busiest rank first of all, tells most
moves from the start that they gain nothing; the others are planned. Schedules by name are planned as they are; for
``adaptive``, whose search takes seconds, each move is given a short climb from the best order known, and the partition
that is found the whole search. A placement whose plans stay clearly longer than another's is left after that climb.
Effort is counted in passes, never in time: the same request gives the same partition everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

from megatron.schedules.planner.adaptive import effort, limit_in_microbatches, placements, search_seconds
from megatron.schedules.planner.partition_plans import CLEARLY, Partition, Planned, with_layers
from megatron.schedules.planner.registry import (
    Request,
    follows_costs,
    placement,
    plan,
    planned_makespan,
)
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.reorder import many_plans
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Parts, Progress, unheard

# Beyond so many microbatches a rank only the steady state grows, and partitions rank as they did.
_MICROBATCHES_A_RANK = 3
# Passes of all plans together, and what each plan takes in the time of so many: some ten seconds. A schedule by name is
# planned in many rounds.
_EFFORT, _NAMED_EFFORT, _OVERHEAD = 600_000, 300_000, 2_000
_FEWEST_PLANS = 24
# Rounds of a climb that tells one partition from another, and of one that tells the best apart.
_ROUNDS, _FINAL_ROUNDS, _FINALISTS = 40, 400, 8
# From where no move gains, so many random ones are made, to bounds this much above the best plan, as a factor. So much
# the whole search may make of what a climb left.
_STEPS, _TRIES, _NEAR = 2, 50, 1.01
# What Python takes for each stage of a bound, in passes that the compiled function schedules. All bounds may take so
# many times as much as all plans.
_BOUND, _BOUNDS = 60, 4
# Rounds in which a plan is polished, about.
_POLISHING = 30
# Of the moves from the even partition that its bound does not rule out, so many are planned at the end, by size.
_FEWEST_CHECKED, _MOST_CHECKED = 4, 64
# Moves that are looked at of each partition; with more than some forty stages there are more.
_MOST_MOVES = 1_600


def partition_layers(request: Request, progress: Progress = unheard) -> Request:
    """``request`` with the layers of its model where its plan is the shortest found, and ``adaptive`` placed there.

    It is never longer than with even layers, nor, up to some eight ranks, than with any one of these moved.
    ``adaptive`` makes its whole search of even layers only where a climb does not show them to be clearly longer, and
    is compared with those of one layer moved by climbs of equal length.

    Args:
        request: its costs have a model.
        progress: hears how far the search is.

    Raises:
        PlanError: where nothing can be planned, whatever the partition.
    """
    if request.costs.model is None:
        raise PlanError("layers can be placed where the model is known", "layers")
    # The tolerance for rounding is made for times around 1, whatever unit costs are in.
    around_one = request.around_one()
    searches = [_Search(around_one, each) for each in _placements(around_one)]
    whole = _whole_search(around_one) * (1 + len(searches))
    parts = Parts(progress, sum(search.effort + search.checks for search in searches) + whole)
    # Few searches make all the plans they may: half of them.
    with many_plans(sum(search.interpreted for search in searches) / 2):
        _climb(searches, parts.begin(sum(search.effort for search in searches)))
        shortest = _checked(_near(searches), parts.begin(sum(search.checks for search in searches)))
    best = placed(around_one, shortest.partition, (shortest.placement.chunks,))
    if request.schedule == "adaptive":
        near = [search for search in _near(searches) if search.even_length <= CLEARLY * shortest.makespan]
        placements = [search.placement for search in near]
        best = _or_even(around_one, best, shortest.makespan, placements, parts.begin(whole))
    parts.end()
    return replace(best, costs=request.costs)


def _climb(searches: Sequence[_Search], progress: Progress) -> None:
    """Searches every placement, those that are clearly longer after a descent no further."""
    parts = sum(search.effort for search in searches)

    def hears(search: _Search) -> Progress:
        return lambda share: progress(share * search.effort / parts)

    for search in searches:
        search.descend(hears(search))
    for search in _near(searches):
        search.wander(hears(search))


def _checked(searches: Sequence[_Search], progress: Progress) -> _Found:
    parts = Parts(progress, sum(search.checks for search in searches))
    found = [search.checked(parts.begin(search.checks)) for search in _near(searches)]
    parts.end()
    return min(found, key=lambda each: each.makespan)


def _near(searches: Sequence[_Search]) -> list[_Search]:
    """Those whose plan is not clearly longer than the shortest of all."""
    shortest = min(search.length for search in searches)
    return [search for search in searches if search.length <= CLEARLY * shortest]


def _whole_search(request: Request) -> float:
    """What the whole search of ``adaptive`` takes, see :func:`_Search.effort`; a schedule by name needs none."""
    return effort(request.ranks, search_seconds(request)) if request.schedule == "adaptive" else 0.0


def _or_even(
    request: Request, found: Request, climbed: float, placements: Sequence[Placement], progress: Progress
) -> Request:
    """``found``, or even layers where the whole search makes more of them than of it.

    Args:
        request: what was asked for.
        found: its layers placed.
        climbed: how long the plan of ``found`` was after a climb.
        placements: where that of even layers was not clearly longer after a climb.
        progress: hears how far the comparison is.
    """
    model = request.costs.model
    assert model is not None
    even = []
    for where in placements:
        other = placed(request, model.evenly(where.stages), (where.chunks,))
        on_stages, limit = other.costs_on(where), limit_in_microbatches(found)
        fits = on_stages.least(where) <= limit + EPSILON
        if fits and lower_bound(where, request.microbatches, on_stages, limit) < _NEAR * climbed:
            even.append(other)
    if not even:
        return found
    candidates, share = (found, *even), 1 / (1 + len(even))
    planned = partial(plan, progress=lambda part: progress(share * part))
    return min(candidates, key=lambda each: planned_makespan(each, planned))


def placed(request: Request, partition: Partition, chunk_choices: tuple[int, ...]) -> Request:
    """``request`` with ``partition``, and with so many chunks where they are chosen."""
    request = with_layers(request, partition)
    return replace(request, chunk_choices=chunk_choices) if request.schedule == "adaptive" else request


def _placements(request: Request) -> list[Placement]:
    if request.schedule == "adaptive":
        return placements(request)
    known = placement(request)
    assert known is not None
    return [known]


def as_layout(partition: Partition, ahead: int = 0) -> str:
    """``partition`` in the letters of Megatron's ``--pipeline-model-parallel-layout``, in model order.

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


class _Search:
    """One placement's search."""

    def __init__(self, request: Request, where: Placement) -> None:
        assert request.costs.model is not None
        self._request, self.placement, self._model = request, where, request.costs.model
        self._even = self._model.evenly(where.stages)
        self._limit = limit_in_microbatches(request) if request.schedule == "adaptive" else math.inf
        self._bounds: dict[tuple[Partition, int], float] = {}
        few = min(request.microbatches, _MICROBATCHES_A_RANK * where.ranks)
        self._planned = Planned(replace(request, microbatches=few), where, self._limit, _ROUNDS)
        # A schedule by name is planned in one way only.
        alike = few == request.microbatches and request.schedule != "adaptive"
        self._whole = self._planned if alike else Planned(request, where, self._limit, _FINAL_ROUNDS)
        self._most = max(_FEWEST_PLANS, self._plans_of(few))
        self._most_checked = min(_MOST_CHECKED, max(_FEWEST_CHECKED, self._plans_of(request.microbatches)))
        self._spread, self.length = self._even, math.inf

    @property
    def effort(self) -> float:
        """What all plans but the checked ones take at most, in passes that the compiled function schedules."""
        return self._most * self._planned.effort

    @property
    def checks(self) -> float:
        """What the checked plans take at most, in the same unit."""
        return (1 + _FINALISTS + self._most_checked) * self._whole.effort

    @property
    def interpreted(self) -> float:
        """Passes that list scheduling places, in many rounds for each plan whose order follows the costs."""
        searched = follows_costs(self._request.schedule, shared_vocabulary=False)
        return self._most * self._planned.size * _POLISHING if searched else 0.0

    @property
    def even_length(self) -> float:
        """How long the plan of even layers was when the best were checked."""
        return self._whole.makespan(self._even)

    def descend(self, progress: Progress) -> None:
        """Down from two partitions to where no move gains."""
        ends = [self._down(start, progress) for start in (self._even, self._levelled())]
        self._spread, self.length = min(ends, key=lambda each: each[1])

    def wander(self, progress: Progress) -> None:
        """On from there by random moves, while plans are left."""
        draw = random.Random(0)
        for _ in range(self._most):
            if self._spent:
                break
            other = self._spread
            for _ in range(_STEPS):
                other = self._aside(other, _NEAR * self.length, draw)
            other, now = self._down(other, progress)
            if now < self.length - EPSILON:
                self._spread, self.length = other, now

    @property
    def _spent(self) -> bool:
        """Whether no plan is left, or as much as they take has gone into bounds several times."""
        bounds = len(self._bounds) * _BOUND * self.placement.stages
        return self._planned.count >= self._most or bounds > _BOUNDS * self.effort

    def _plans_of(self, microbatches: int) -> int:
        """How many the effort suffices for."""
        passes = _EFFORT if self._request.schedule == "adaptive" else _NAMED_EFFORT
        return passes // (3 * self.placement.stages * microbatches + _OVERHEAD)

    def _levelled(self) -> Partition:
        """Layer by layer to the rank that has least to do, and there to the stage that has."""
        model, where = self._model, self.placement
        ends = [0.0] * where.stages
        for stage, part in ((0, model.first), (where.last_stage, model.last)):
            ends[stage] += sum(part.split.plus(part.whole)[:3]) / sum(model.mean[:3])
        counts = [0] * where.stages
        for _ in model.layers:
            rank = min(range(where.ranks), key=lambda r: sum(ends[s] + counts[s] for s in where.stages_of(r)))
            counts[min(where.stages_of(rank), key=lambda s: ends[s] + counts[s])] += 1
        return tuple(counts)

    def _aside(self, partition: Partition, length: float, draw: random.Random) -> Partition:
        """A random move of one layer that could lead below ``length``; none where few do."""
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
            for _, moved in sorted(self._shorter(partition, length, self._planned.microbatches)):
                known = self._planned.count
                if known >= self._most:
                    break
                now = self._planned.makespan(moved)
                progress((self._planned.count - known) / self._most)
                if now < length - EPSILON:
                    partition, length, gained = moved, now, True
                    break
        return partition, length

    def checked(self, progress: Progress) -> _Found:
        """The shortest of those that the search liked best, of the even partition, and of those a layer away from it.

        All are planned as they were asked for, or climbed for longer.
        """
        whole, share = self._whole, 1 / (1 + _FINALISTS + self._most_checked)
        best, length = self._even, math.inf
        for other in (self._even, *self._planned.shortest(_FINALISTS)):
            now = whole.makespan(other)
            progress(share)
            if now < length:
                best, length = other, now
        for bound, other in sorted(self._shorter(self._even, length, self._request.microbatches))[: self._most_checked]:
            hopeful = bound < length - EPSILON and not self._planned.clearly_longer(other)
            if hopeful and (now := whole.makespan(other)) < length - EPSILON:
                best, length = other, now
            progress(share)
        return _Found(best, self.placement, length)

    def _shorter(self, partition: Partition, length: float, microbatches: int) -> Iterator[tuple[float, Partition]]:
        """Spreads with one layer elsewhere that could be shorter than ``length``, and what they cannot be below."""
        for source, to in self._moves(partition):
            moved = _moved(partition, source, to)
            bound = self._bound(moved, microbatches)
            if bound < length - EPSILON:
                yield bound, moved

    def _moves(self, partition: Partition) -> list[tuple[int, int]]:
        """From which stage to which a layer may go: from any to any; of very many, all from the busiest, and some."""
        found = [move for move in permutations(range(len(partition)), 2) if partition[move[0]]]
        if len(found) <= _MOST_MOVES:
            return found
        times, where = with_layers(self._request, partition).costs_on(self.placement).times.values(), self.placement
        loads = [sum(each[stage] for each in times for stage in where.stages_of(rank)) for rank in range(where.ranks)]
        busiest = where.stages_of(loads.index(max(loads)))
        first = [move for move in found if move[0] in busiest]
        others = [move for move in found if move[0] not in busiest]
        return first + random.Random(0).sample(others, min(len(others), _MOST_MOVES))

    def _bound(self, partition: Partition, microbatches: int) -> float:
        if (partition, microbatches) not in self._bounds:
            self._bounds[partition, microbatches] = self._bounded(partition, microbatches)
        return self._bounds[partition, microbatches]

    def _bounded(self, partition: Partition, microbatches: int) -> float:
        on_stages = with_layers(self._request, partition).costs_on(self.placement)
        limit = self._limit if self._limit == math.inf else max(self._limit, on_stages.least(self.placement))
        return lower_bound(self.placement, microbatches, on_stages, limit)


def _moved(partition: Partition, source: int, to: int) -> Partition:
    moved = list(partition)
    moved[source] -= 1
    moved[to] += 1
    return tuple(moved)
