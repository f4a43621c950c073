"""Which stage has how many layers: the spread whose plan is the shortest.

A local search that moves one layer at a time. What bounds a plan from below, its busiest rank first of all, tells most
moves from the start that they gain nothing; the others are planned. Schedules by name are planned as they are; for
``adaptive``, whose search takes seconds, each move is given a short climb from the best order known, and the spread
that is found the whole search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from megatron.schedules.planning.adaptive.bound import lower_bound
from megatron.schedules.planning.adaptive.plan import limit_in_microbatches, placements
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.list_scheduling import EPSILON
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.progress import Progress, unheard
from megatron.schedules.planning.registry import Request, placement, planned_makespan, unchecked_plan
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.stage_costs import StageCosts

Spread = tuple[int, ...]
"""Decoder layers of each stage, in model order."""

# Beyond so many microbatches a rank only the steady state grows, and spreads rank as they did.
_MICROBATCHES_A_RANK = 3
# Passes of all plans together, and what each plan takes in the time of so many: some ten seconds. A schedule by name is
# planned in many rounds.
_EFFORT, _NAMED_EFFORT, _OVERHEAD = 600_000, 300_000, 2_000
_FEWEST_PLANS = 24
# Rounds of a climb that tells one spread from another, and of one that tells the best apart.
_ROUNDS, _FINAL_ROUNDS, _FINALISTS = 40, 400, 8
# From where no move gains, so many random ones are made, to bounds this much above the best plan, as a factor. So much
# the whole search may make of what a climb left.
_STEPS, _TRIES, _NEAR = 2, 50, 1.01
# Of the moves from the even spread that its bound does not rule out, so many are planned at the end, by size.
_FEWEST_CHECKED, _MOST_CHECKED = 4, 64
# Moves that are looked at of each spread; with more than some forty stages there are more.
_MOST_MOVES = 1_600


def spread_layers(request: Request, progress: Progress = unheard) -> Request:
    """``request`` with the layers of its model where its plan is the shortest found, and ``adaptive`` placed there.

    It is never longer than with even layers, nor, up to some eight ranks, than with any one of these moved;
    ``adaptive`` is compared with the latter by climbs of equal length, not by its whole search.

    Args:
        request: its costs have a model.
        progress: hears how far the search is.

    Raises:
        PlanError: where nothing can be planned, whatever the spread.
    """
    if request.costs.model is None:
        raise PlanError("layers can be placed where the model is known", "layers")
    # The tolerance for rounding is made for times around 1: whatever unit costs are in, the same layers are found.
    around_one = replace(request, costs=request.costs.around_one()[0])
    found = []
    where = _placements(around_one)
    for each in where:
        found.append(_Search(around_one, each).best(lambda share: progress(share / len(where))))
    shortest = min(found, key=lambda each: each.makespan)
    best = placed(around_one, shortest.spread, (shortest.placement.chunks,))
    if request.schedule == "adaptive":
        best = _or_even(around_one, best, shortest.makespan)
    return replace(best, costs=replace(request.costs, layers=best.costs.layers))


def _or_even(request: Request, found: Request, climbed: float) -> Request:
    """``found``, or even layers where the whole search makes more of them than of it.

    Args:
        request: what was asked for.
        found: its layers placed.
        climbed: how long the plan of ``found`` was after a climb.
    """
    model = request.costs.model
    assert model is not None
    even = []
    for where in _placements(request):
        other = placed(request, model.evenly(where.stages), (where.chunks,))
        on_stages, limit = other.costs.on(where), limit_in_microbatches(found)
        fits = on_stages.least(where) <= limit + EPSILON
        if fits and lower_bound(where, request.microbatches, on_stages, limit) < _NEAR * climbed:
            even.append(other)
    return min((found, *even), key=planned_makespan) if even else found


def placed(request: Request, spread: Spread, chunk_choices: tuple[int, ...]) -> Request:
    """``request`` with ``spread``, and with so many chunks where they are chosen."""
    request = replace(request, costs=replace(request.costs, layers=spread))
    return replace(request, chunk_choices=chunk_choices) if request.schedule == "adaptive" else request


def _placements(request: Request) -> list[Placement]:
    if request.schedule == "adaptive":
        return placements(request)
    known = placement(request)
    assert known is not None
    return [known]


def as_layout(spread: Spread, ahead: int = 0) -> str:
    """``spread`` in the letters of Megatron's ``--pipeline-model-parallel-layout``, in model order.

    Args:
        spread: layers of each stage.
        ahead: layers of multi-token prediction, on the last stage.
    """
    stages = ["t" * count for count in spread]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * ahead + "L"
    return "|".join(stages)


def microbatches_held(timeline: Timeline) -> float:
    """The most of its own microbatches that a rank holds at once."""
    where, activation = timeline.schedule.placement, timeline.costs.activation
    held = [sum(activation[stage] for stage in where.stages_of(rank)) for rank in range(where.ranks)]
    return max((peak / one for peak, one in zip(timeline.peaks, held, strict=True) if one), default=0.0)


@dataclass(frozen=True)
class _Found:
    spread: Spread
    placement: Placement
    makespan: float


class _Search:
    """One placement's search."""

    def __init__(self, request: Request, where: Placement) -> None:
        assert request.costs.model is not None
        self._request, self._placement, self._model = request, where, request.costs.model
        self._even = self._model.evenly(where.stages)
        self._limit = limit_in_microbatches(request) if request.schedule == "adaptive" else math.inf
        self._bounds: dict[tuple[Spread, int], float] = {}
        few = min(request.microbatches, _MICROBATCHES_A_RANK * where.ranks)
        self._planned = _Planned(replace(request, microbatches=few), where, self._limit, _ROUNDS)

    def best(self, progress: Progress) -> _Found:
        """Down from two spreads to where no move gains, and on from there by random ones, while plans are left."""
        draw = random.Random(0)
        most = max(_FEWEST_PLANS, self._plans_of(self._planned.microbatches))
        ends = [self._down(start, most, progress) for start in (self._even, self._relieved())]
        spread, length = min(ends, key=lambda each: each[1])
        for _ in range(most):
            if self._planned.count >= most:
                break
            other = spread
            for _ in range(_STEPS):
                other = self._aside(other, _NEAR * length, draw)
            other, now = self._down(other, most, progress)
            if now < length - EPSILON:
                spread, length = other, now
        return self._checked()

    def _plans_of(self, microbatches: int) -> int:
        """How many the effort suffices for."""
        effort = _EFFORT if self._request.schedule == "adaptive" else _NAMED_EFFORT
        return effort // (3 * self._placement.stages * microbatches + _OVERHEAD)

    def _relieved(self) -> Spread:
        """Layer by layer to the rank that has least to do, and there to the stage that has."""
        model, where = self._model, self._placement
        ends = [0.0] * where.stages
        for stage, part in ((0, model.first), (where.last_stage, model.last)):
            ends[stage] += sum(part.split.plus(part.whole)[:3]) / sum(model.mean[:3])
        counts = [0] * where.stages
        for _ in model.layers:
            rank = min(range(where.ranks), key=lambda r: sum(ends[s] + counts[s] for s in where.stages_of(r)))
            counts[min(where.stages_of(rank), key=lambda s: ends[s] + counts[s])] += 1
        return tuple(counts)

    def _aside(self, spread: Spread, length: float, draw: random.Random) -> Spread:
        """A random move of one layer that could lead below ``length``; none where few do."""
        for _ in range(_TRIES):
            source, to = draw.sample(range(len(spread)), 2)
            if spread[source] and self._bound(other := _moved(spread, source, to), self._planned.microbatches) < length:
                return other
        return spread

    def _down(self, spread: Spread, most: int, progress: Progress) -> tuple[Spread, float]:
        length, gained = self._planned.makespan(spread), True
        while gained:
            gained = False
            for _, moved in sorted(self._shorter(spread, length, self._planned.microbatches)):
                known = self._planned.count
                if known >= most:
                    break
                now = self._planned.makespan(moved)
                progress((self._planned.count - known) / most)
                if now < length - EPSILON:
                    spread, length, gained = moved, now, True
                    break
        return spread, length

    def _checked(self) -> _Found:
        """The shortest of those that the search liked best, of the even spread, and of those a layer away from it.

        All are planned as they were asked for, or climbed for longer.
        """
        whole = _Planned(self._request, self._placement, self._limit, _FINAL_ROUNDS)
        best = min((self._even, *self._planned.shortest(_FINALISTS)), key=whole.makespan)
        length = whole.makespan(best)
        checked = min(_MOST_CHECKED, max(_FEWEST_CHECKED, self._plans_of(self._request.microbatches)))
        for bound, other in sorted(self._shorter(self._even, length, self._request.microbatches))[:checked]:
            if bound < length - EPSILON and (now := whole.makespan(other)) < length - EPSILON:
                best, length = other, now
        return _Found(best, self._placement, length)

    def _shorter(self, spread: Spread, length: float, microbatches: int) -> Iterator[tuple[float, Spread]]:
        """Spreads with one layer elsewhere that could be shorter than ``length``, and what they cannot be below."""
        for source, to in self._moves(spread):
            moved = _moved(spread, source, to)
            bound = self._bound(moved, microbatches)
            if bound < length - EPSILON:
                yield bound, moved

    def _moves(self, spread: Spread) -> list[tuple[int, int]]:
        """From which stage to which a layer may go: from any to any; of very many, all from the busiest, and some."""
        found = [move for move in permutations(range(len(spread)), 2) if spread[move[0]]]
        if len(found) <= _MOST_MOVES:
            return found
        times, where = _on(self._request.costs, spread, self._placement).times.values(), self._placement
        loads = [sum(each[stage] for each in times for stage in where.stages_of(rank)) for rank in range(where.ranks)]
        busiest = where.stages_of(loads.index(max(loads)))
        first = [move for move in found if move[0] in busiest]
        others = [move for move in found if move[0] not in busiest]
        return first + random.Random(0).sample(others, min(len(others), _MOST_MOVES))

    def _bound(self, spread: Spread, microbatches: int) -> float:
        if (spread, microbatches) not in self._bounds:
            self._bounds[spread, microbatches] = self._bounded(spread, microbatches)
        return self._bounds[spread, microbatches]

    def _bounded(self, spread: Spread, microbatches: int) -> float:
        on_stages = _on(self._request.costs, spread, self._placement)
        limit = self._limit if self._limit == math.inf else max(self._limit, on_stages.least(self._placement))
        return lower_bound(self._placement, microbatches, on_stages, limit)


class _Planned:
    """Plans of one request, one spread after another."""

    def __init__(self, request: Request, where: Placement, limit: float, rounds: int) -> None:
        self._request, self._placement, self._limit, self._rounds = request, where, limit, rounds
        self._known: dict[Spread, float] = {}
        self._most = 0.0  # microbatches, of the first spread that is asked for
        self._order: Schedule | None = None
        self._length = math.inf

    @property
    def count(self) -> int:
        """Spreads that were planned."""
        return len(self._known)

    def shortest(self, number: int) -> list[Spread]:
        """So many of those planned."""
        return sorted(self._known, key=lambda spread: (self._known[spread], spread))[:number]

    @property
    def microbatches(self) -> int:
        return self._request.microbatches

    def makespan(self, spread: Spread) -> float:
        """Infinite where the spread holds too much."""
        if spread not in self._known:
            climbs = self._request.schedule == "adaptive"
            self._known[spread] = self._climbed(spread) if climbs else self._named(spread)
        return self._known[spread]

    def _named(self, spread: Spread) -> float:
        costs = replace(self._request.costs, layers=spread)
        timeline = simulate(unchecked_plan(replace(self._request, costs=costs)), costs.on(self._placement))
        # A schedule by name says how many microbatches it holds; a rank with more layers holds more with as many.
        held = microbatches_held(timeline)
        self._most = self._most or held
        return timeline.makespan if held <= self._most + EPSILON else math.inf

    def _climbed(self, spread: Spread) -> float:
        from megatron.schedules.planning.adaptive.problem import Problem
        from megatron.schedules.planning.adaptive.search import Entry, race

        problem = Problem(self._placement, self.microbatches, _on(self._request.costs, spread, self._placement))
        if problem.least > self._limit + EPSILON:
            return math.inf
        starts = [problem.order(each) for each in (self._order, None)]
        fitting = [order for order in starts if problem.fits(order, self._limit)]
        (climb,), _ = race([Entry(problem, fitting)], self._limit, self._rounds * len(fitting) * problem.effort)
        if climb.makespan < self._length:
            self._length = climb.makespan
            rows = problem.rows(climb.best)
            self._order = Schedule("adaptive", self._placement, self.microbatches, rows)
        return climb.makespan


def _moved(spread: Spread, source: int, to: int) -> Spread:
    moved = list(spread)
    moved[source] -= 1
    moved[to] += 1
    return tuple(moved)


def _on(costs: Costs, spread: Spread, where: Placement) -> StageCosts:
    return replace(costs, layers=spread).on(where)
