"""Plans one request under many layer partitions, for the search that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import batched
from typing import TYPE_CHECKING

from megatron.schedules.planner.registry import Request, unchecked_plan
from megatron.schedules.schedule.model_loads import ModelLoads, without_noise
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.utils.cores import on_all_cores
from megatron.schedules.utils.progress import Progress

if TYPE_CHECKING:
    from megatron.schedules.search.climb import Entry, OrderClimb, Trials

Partition = tuple[int, ...]
"""Decoder layers of each stage, in model order."""

# Plans longer than the best one by this factor are dropped. Smaller differences between climbs may be chance.
CLEARLY = 1.03
# With more microbatches per rank only the steady state gets longer, and the ranking of plans stays the same.
_MICROBATCHES_A_RANK = 3
# So many plans are made at the same time where only the first may be of use.
_AHEAD = 2
# Python time for each pass of a plan, and for each call, in passes that the compiled function schedules.
_IN_PYTHON, _CALL = 80, 200


def few_microbatches(request: Request) -> int:
    """Number of microbatches with which plans of ``request`` are compared."""
    return min(request.microbatches, _MICROBATCHES_A_RANK * request.ranks)


def microbatches_held(timeline: Timeline) -> float:
    """Peak activation memory of the worst rank, in microbatches of that rank's own stages."""
    where, activation = timeline.schedule.placement, timeline.costs.activation
    held = [sum(activation[stage] for stage in where.stages_of(rank)) for rank in range(where.ranks)]
    return max((peak / one for peak, one in zip(timeline.peaks, held, strict=True) if one), default=0.0)


class Planned:
    """Plans of one request, one for each layer partition tried.

    Args:
        request: the request.
        where: its placement.
        limit: memory limit, microbatches on an average rank.
        rounds: rounds of a climb from each start.
    """

    def __init__(self, request: Request, where: Placement, limit: float, rounds: int) -> None:
        self._request, self._placement, self.limit, self._rounds = request, where, limit, rounds
        self._climbs = request.schedule == "adaptive"
        self._known: dict[Partition, float] = {}
        self._most = 0.0  # peak of the first planned partition, microbatches

    @property
    def size(self) -> int:
        """Passes of a plan."""
        return 3 * self._placement.stages * self.microbatches

    @property
    def effort(self) -> float:
        """Effort of one plan, in passes that the compiled function schedules."""
        return _IN_PYTHON * self.size + self.climb_effort * self._climbs

    @property
    def climb_effort(self) -> float:
        """Effort of a climb from both starts, in the same unit."""
        return 2 * self._rounds * (self.size + _CALL)

    @property
    def count(self) -> int:
        """Number of partitions that were planned."""
        return len(self._known)

    @property
    def schedule(self) -> Schedule | None:
        """Shortest schedule that a climb found; None for named schedules."""
        return self._trials.schedule if self._climbs else None

    def shortest(self, number: int) -> list[Partition]:
        """Returns the ``number`` partitions with the shortest plans, shortest first."""
        return sorted(self._known, key=lambda partition: (self._known[partition], partition))[:number]

    def entry(self, partition: Partition) -> Entry:
        """The climbs' problem for ``partition``, with the starts that fit."""
        return self._trials.entry(with_layers(self._request, partition).costs_on(self._placement))

    def learn(self, climb: OrderClimb) -> None:
        """Makes the order of ``climb`` the next start if it is the shortest so far."""
        self._trials.learn(climb)

    @property
    def microbatches(self) -> int:
        return self._request.microbatches

    def makespan(self, partition: Partition) -> float:
        """Makespan of the plan for ``partition``; infinite if it needs too much memory."""
        plan_together([(self, partition)])
        return self._known[partition]

    def ahead(self, partitions: Iterator[Partition], most: int) -> Iterator[tuple[Partition, float]]:
        """Yields ``partitions`` with their makespans, until ``most`` are planned.

        Climbs of the next ones run at the same time. Those that are not asked for are forgotten. A plan that is no
        shorter than those before teaches others nothing, so all is as if planned one after another.
        """
        for some in batched(partitions, _AHEAD if self._climbs else 1):
            made = _new_plans([(self, partition) for partition in some])
            for partition in some:
                if self.count >= most:
                    return
                if (self, partition) in made:
                    self.keep(partition, made[self, partition])
                yield partition, self._known[partition]

    def knows(self, partition: Partition) -> bool:
        """Whether ``partition`` was planned."""
        return partition in self._known

    def planning(self, partition: Partition) -> Callable[[], OrderClimb | float]:
        """Returns a function that plans ``partition`` and changes nothing; its result is for :meth:`keep`."""
        if self._climbs:
            return partial(self._climb, self.entry(partition))
        return partial(self._named, partition)

    def keep(self, partition: Partition, made: OrderClimb | float) -> None:
        """Keeps the result of :meth:`planning`."""
        if isinstance(made, float):
            self._known[partition] = made
        else:
            self._known[partition] = made.makespan
            self.learn(made)

    def _climb(self, entry: Entry) -> OrderClimb | float:
        """Climbs from the starts of ``entry``; returns infinity if it has none."""
        return self._trials.climb(entry) or math.inf

    def _named(self, partition: Partition) -> float:
        request = with_layers(self._request, partition)
        timeline = simulate(unchecked_plan(request), request.costs_on(self._placement))
        # A named schedule has a fixed number of microbatches in memory. A rank with more layers needs more memory for
        # as many.
        held = microbatches_held(timeline)
        self._most = self._most or held
        return timeline.makespan if held <= self._most + EPSILON else math.inf

    @cached_property
    def _trials(self) -> Trials:
        from megatron.schedules.search.climb import Trials

        return Trials(self._placement, self.microbatches, self.limit, self._rounds)


def promising(
    fields: Sequence[tuple[Planned, Sequence[Partition]]], number: int, worth: float, progress: Progress
) -> list[tuple[Planned, Partition]]:
    """Returns at most ``number`` partitions that climbs find best, the best first.

    All climbs compete for the effort of ``worth`` plans. Most of it goes to the best partitions.

    Args:
        fields: for each placement its plans, and the partitions to compare.
        number: number of partitions.
        worth: effort, in plans of the placement with most stages.
        progress: receives the progress.
    """
    from megatron.schedules.search.climb import contest

    entries = {
        (planned, partition): entry
        for planned, partitions in fields
        for partition in partitions
        if (entry := planned.entry(partition)).starts
    }
    if not entries:
        return []
    passes = worth * max(planned.climb_effort for planned, _ in entries)
    limit = max(planned.limit for planned, _ in entries)
    climbs = dict(zip(entries, contest(list(entries.values()), limit, passes, progress), strict=True))
    for (planned, _), climb in climbs.items():
        planned.learn(climb)
    return sorted(climbs, key=lambda field: climbs[field].makespan)[:number]


def plan_together(candidates: Sequence[tuple[Planned, Partition]]) -> None:
    """Plans those of ``candidates`` that were not, at the same time. No climb learns from another of these."""
    for (planned, partition), made in _new_plans(candidates).items():
        planned.keep(partition, made)


def _new_plans(
    candidates: Sequence[tuple[Planned, Partition]],
) -> dict[tuple[Planned, Partition], OrderClimb | float]:
    """Plans those of ``candidates`` that were not, at the same time; nothing of it is kept yet."""
    new = [(planned, partition) for planned, partition in candidates if not planned.knows(partition)]
    made = on_all_cores([planned.planning(partition) for planned, partition in new])
    return dict(zip(new, made, strict=True))


def with_layers(request: Request, partition: Partition) -> Request:
    """Returns ``request`` with this layer partition settled."""
    return replace(request, decisions=replace(request.decisions, layers=partition), partition=False)


def levelled(model: ModelLoads, where: Placement, together: int = 1) -> Partition:
    """Returns a partition without a search: adds each layer to the least loaded rank, and there to its least stage.

    Args:
        model: the model.
        where: its placement.
        together: layers that are added at once.
    """
    ends = [0.0] * where.stages
    for stage, part in ((0, model.first), (where.last_stage, model.last)):
        ends[stage] += without_noise(sum(part.split.plus(part.whole)[:3]) / sum(model.mean[:3]))
    counts = [0] * where.stages
    for begin in range(0, len(model.layers), together):
        rank = min(range(where.ranks), key=lambda r: sum(ends[s] + counts[s] for s in where.stages_of(r)))
        counts[min(where.stages_of(rank), key=lambda s: ends[s] + counts[s])] += len(
            model.layers[begin : begin + together]
        )
    return tuple(counts)
