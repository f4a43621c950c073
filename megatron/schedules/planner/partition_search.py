"""Compares layer partitions on one placement: a local search that moves one layer at a time.

Where several layers are as a GPT's block, it first searches as for the GPT, with as many layers at a time. Then it
moves single layers, from the even partition and from the best found. So plans are no longer than the GPT's, and the
search takes three times as long.

Lower bounds, first of all the time of the busiest rank, rule out most moves without planning. The other moves are
planned. Named schedules are planned as usual. ``adaptive`` searches for seconds, so each move gets only a short climb
from the best known order. Effort is counted in passes, not in time, so that the same request gives the same partition
on all machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, permutations

from megatron.schedules.planner.adaptive import limit_in_microbatches
from megatron.schedules.planner.partition_plans import Partition, Planned, few_microbatches, levelled, with_layers
from megatron.schedules.planner.registry import Request, follows_costs
from megatron.schedules.schedule.model_loads import ModelLoads, even
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.utils.progress import Progress

# Passes of all plans together, about ten seconds, and the overhead of each plan, in passes. A named schedule is planned
# in many rounds.
_EFFORT, _NAMED_EFFORT, _OVERHEAD = 600_000, 300_000, 2_000
_FEWEST_PLANS = 24
# Rounds of a climb that compares partitions, rounds of one that compares the best, and the number of these. Large
# plans get fewer rounds: each of their climbs schedules about this number of passes from each start.
_ROUNDS, _FINAL_ROUNDS, _FINALISTS = 40, 400, 8
_FEWEST_ROUNDS, _PASSES, _FINAL_PASSES = 16, 200_000, 1_250_000
# From a local optimum, so many random moves are made. Each has so many attempts to find a move whose bound is within
# this factor of the best plan.
_STEPS, _TRIES, NEAR = 2, 50, 1.01
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


@dataclass(frozen=True)
class Found:
    """A partition with its plan.

    Args:
        partition: decoder layers of each stage.
        placement: where the stages are.
        makespan: makespan of the plan.
        schedule: shortest schedule that climbs found on this placement; None for named schedules.
    """

    partition: Partition
    placement: Placement
    makespan: float
    schedule: Schedule | None


class PartitionSearch:
    """Search on one placement.

    Args:
        request: the request, with costs around 1.
        where: the placement.
    """

    def __init__(self, request: Request, where: Placement) -> None:
        from megatron.schedules.planner.busy_times import BusyTimes  # which needs numpy

        self._request, self.placement, self._model = request, where, request.costs.model
        self._even = self._model.evenly(where.stages)
        self.named = request.schedule != "adaptive"
        self._limit = math.inf if self.named else limit_in_microbatches(request)
        self._bounds: dict[tuple[Partition, int], float] = {}
        self._busy = BusyTimes(request, where)
        few = few_microbatches(request)
        self._planned = Planned(
            replace(request, microbatches=few), where, self._limit, _rounds(_ROUNDS, _PASSES, where, few)
        )
        # A named schedule is planned in one way only.
        alike = few == request.microbatches and self.named
        final = _rounds(_FINAL_ROUNDS, _FINAL_PASSES, where, request.microbatches)
        self.whole = self._planned if alike else Planned(request, where, self._limit, final)
        self._together = self._model.block  # layers that are moved at once
        # Plans of a search, of all of them, and those after which the current one ends.
        self._each = self._most = max(_FEWEST_PLANS, self._plans_of(few))
        self._all = self._each * searches(self._model)
        checked = self._plans_of(request.microbatches) * _FULLY_CHECKED // max(_FULLY_CHECKED, where.ranks)
        self._most_checked = min(_MOST_CHECKED, max(_FEWEST_CHECKED, checked))
        # Number of plans of the final check, without those of partitions that compete with other placements'.
        self._checks = 1 + (_FINALISTS + self._most_checked) * self.named
        self.best, self.length = self._even, math.inf

    @property
    def effort(self) -> float:
        """Largest effort of all plans except the final checks, in passes that the compiled function schedules."""
        return self._all * self._planned.effort

    @property
    def checks(self) -> float:
        """Largest effort of the final checks, in the same unit."""
        return self._checks * self.whole.effort

    @property
    def interpreted(self) -> float:
        """Passes that list scheduling places, in many rounds per plan if the order follows the costs."""
        searched = follows_costs(self._request.schedule, shared_vocabulary=False)
        return self._all * self._planned.size * _POLISHING if searched else 0.0

    def even_within(self, length: float) -> bool:
        """Checks that the plan with even layers is not longer than ``length``."""
        bound = self._bound(self._even, self._request.microbatches)
        return bound <= length and self.whole.makespan(self._even) <= length

    def descend(self, progress: Progress) -> None:
        """Descends from two start partitions until no move gains."""
        self._down_from(self._starts, progress)

    def refine(self, progress: Progress) -> None:
        """Searches with moves of single layers, if they were of several."""
        if self._together == 1:
            return
        self._together = 1
        for starts in (self._starts, (self.best,)):
            self._most = self._planned.count + self._each
            self._down_from(starts, progress)
        self.wander(progress)

    @property
    def _starts(self) -> tuple[Partition, Partition]:
        """The even partition and the levelled one, of so many layers at a time."""
        together, model, stages = self._together, self._model, self.placement.stages
        whole, rest = divmod(len(model.layers), together)
        placed = together == 1 or rest or model.ends != (None, None) or any(model.stand_in)
        first = self._even if placed else tuple(together * count for count in even(whole, stages))
        return first, levelled(model, self.placement, together)

    def _down_from(self, starts: Sequence[Partition], progress: Progress) -> None:
        ends = [self._down(start, progress) for start in starts]
        self.best, self.length = min((*ends, (self.best, self.length)), key=lambda each: each[1])

    def wander(self, progress: Progress) -> None:
        """Continues with random moves until all plans are used."""
        draw = random.Random(0)
        for _ in range(self._most):
            if self._spent:
                break
            other = self.best
            for _ in range(_STEPS):
                other = self._aside(other, NEAR * self.length, draw)
            other, now = self._down(other, progress)
            if now < self.length - EPSILON:
                self.best, self.length = other, now

    @property
    def _spent(self) -> bool:
        """Returns True if no plan is left, or if the bounds took several times the effort of all plans."""
        bounds = len(self._bounds) * _BOUND * self.placement.stages
        return self._planned.count >= self._most or bounds > _BOUNDS * self.effort

    def _plans_of(self, microbatches: int) -> int:
        """Number of plans that the effort allows."""
        passes = _NAMED_EFFORT if self.named else _EFFORT
        return passes // (3 * self.placement.stages * microbatches + _OVERHEAD)

    def _aside(self, partition: Partition, length: float, draw: random.Random) -> Partition:
        """A random move of one layer that could lead below ``length``; ``partition`` if few can."""
        for _ in range(_TRIES):
            source, to = draw.sample(range(len(partition)), 2)
            other = _moved(partition, source, to, self._together)
            if partition[source] >= self._together and self._bound(other, self._planned.microbatches) < length:
                return other
        return partition

    def _down(self, partition: Partition, progress: Progress) -> tuple[Partition, float]:
        length, gained = self._planned.makespan(partition), True
        while gained and not self._spent:
            gained = False
            moves = self._shorter(partition, length, self._planned.microbatches)
            known = self._planned.count
            for moved, now in self._planned.ahead(moves, self._most):
                progress((self._planned.count - known) / self._all)
                known = self._planned.count
                if now < length - EPSILON:
                    partition, length, gained = moved, now, True
                    break
        return partition, length

    @property
    def found(self) -> Found:
        """Shortest of all plans as requested."""
        (best,) = self.whole.shortest(1)
        return Found(best, self.placement, self.whole.makespan(best), self.whole.schedule)

    def candidates(self, shortest: float) -> list[Partition]:
        """The best partitions of the search, the even one, and those one layer away from it, if bounds allow them.

        Those that cannot be shorter than ``shortest`` are left out.
        """
        microbatches = self._request.microbatches
        known = [*self._planned.shortest(_FINALISTS), self._even]
        beside = islice(self._shorter(self._even, shortest, microbatches), self._most_checked)
        field = dict.fromkeys((*known, *beside))
        return [other for other in field if self._bound(other, microbatches) < shortest - EPSILON]

    def planned(self, progress: Progress) -> Found:
        """Shortest plan among the best partitions of the search, the even one, and those one layer away from it."""
        whole, microbatches = self.whole, self._request.microbatches
        # A named schedule may hold as many microbatches as its first plan does.
        for other in (self._even, *self._planned.shortest(_FINALISTS)):
            whole.makespan(other)
            progress(1 / self._checks)
        least = self.found.makespan
        for other in islice(self._shorter(self._even, least, microbatches), self._most_checked):
            if self._bound(other, microbatches) < least - EPSILON:
                least = min(least, whole.makespan(other))
            progress(1 / self._checks)
        return self.found

    def _shorter(self, partition: Partition, length: float, microbatches: int) -> Iterator[Partition]:
        """Partitions with one layer moved that could be shorter than ``length``, after their bounds in ascending order.

        A bound takes much longer than the time of the busiest rank, which often is the bound. So it is computed only
        when its turn may have come.
        """
        moves = self._moves(partition, microbatches)
        waiting = list(zip(self._busy.of(moves, microbatches).max(axis=1).tolist(), moves, strict=True))
        heapify(waiting)
        while waiting and waiting[0][0] < length - EPSILON:
            least, moved = heappop(waiting)
            bound = self._bound(moved, microbatches)
            if bound <= least + EPSILON:
                yield moved
            else:
                heappush(waiting, (bound, moved))

    def _moves(self, partition: Partition, microbatches: int) -> list[Partition]:
        """Partitions with one layer moved; if these are too many, all from the busiest rank and a sample."""
        found = [move for move in permutations(range(len(partition)), 2) if partition[move[0]] >= self._together]
        if len(found) > _MOST_MOVES:
            (busy,) = self._busy.of([partition], microbatches)
            busiest = self.placement.stages_of(int(busy.argmax()))
            others = [move for move in found if move[0] not in busiest]
            found = [move for move in found if move[0] in busiest]
            found += random.Random(0).sample(others, min(len(others), _MOST_MOVES))
        return [_moved(partition, *move, self._together) for move in found]

    def _bound(self, partition: Partition, microbatches: int) -> float:
        if (partition, microbatches) not in self._bounds:
            self._bounds[partition, microbatches] = self._bounded(partition, microbatches)
        return self._bounds[partition, microbatches]

    def _bounded(self, partition: Partition, microbatches: int) -> float:
        on_stages = with_layers(self._request, partition).costs_on(self.placement)
        limit = self._limit if self._limit == math.inf else max(self._limit, on_stages.least(self.placement))
        return lower_bound(self.placement, microbatches, on_stages, limit)


def searches(model: ModelLoads) -> int:
    """Returns the number of searches on one placement: where a block is one layer a single one, otherwise three."""
    return 1 if model.block == 1 else 3


def _rounds(most: int, passes: int, where: Placement, microbatches: int) -> int:
    """Number of rounds that schedule at most ``passes`` passes."""
    return max(_FEWEST_ROUNDS, min(most, passes // (3 * where.stages * microbatches)))


def _moved(partition: Partition, source: int, to: int, layers: int) -> Partition:
    moved = list(partition)
    moved[source] -= layers
    moved[to] += layers
    return tuple(moved)
