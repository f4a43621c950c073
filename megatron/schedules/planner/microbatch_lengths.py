"""A plan for the microbatches of one iteration: their order, and a schedule of them in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.microbatch_loads import MicrobatchLoads
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Rows, Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.microbatch_order import Places
from megatron.schedules.search.polish import finished
from megatron.schedules.search.tasks import Tasks, tasks_of
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted

# Passes that are placed in all: some 0.3 s on a usual core. A count, so that all ranks find the same.
EFFORT = 2_400_000
_FEWEST_ROUNDS = 64
# How much longer than before an order may be that is gone on from, as a share of a forward over half a rank's layers.
_THRESHOLD = 0.25


@dataclass(frozen=True)
class LengthsPlan:
    """What an iteration does with its microbatches.

    Args:
        order: place k has the data loader's microbatch ``order[k]``.
        timeline: the schedule, of places, with its times.
    """

    order: tuple[int, ...]
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """The passes, of places: each stage does its microbatches in their order."""
        return self.timeline.schedule


class LengthsPlanner:
    """Plans iterations that differ in their microbatches' lengths alone.

    Args:
        base: the schedule for microbatches that are alike; its placement, and whether backwards are split, stay.
        costs: of a standard microbatch.
        limit: standard microbatches that an average rank may hold at a time; as many as ``base`` holds without it.
        decisions: what is settled about the stages of ``base``.
    """

    def __init__(self, base: Schedule, costs: Costs, limit: float | None = None, decisions: Decisions = PLAIN) -> None:
        self._base = base
        around, self._unit = costs.around_one()
        self._costs = around.on(base.placement, decisions)
        most = simulate(base, self._costs).limit if limit is None else limit
        self._limits = self._costs.limits(base.placement, most)
        self._split = _split(base) if base.splits else base

    @property
    def limits(self) -> Sequence[float]:
        """What each rank may hold, in standard microbatches."""
        return self._limits

    @cached_property
    def _tasks(self) -> tuple[Tasks, list[Pass]]:
        """In their standard times."""
        alike = MicrobatchLoads(*((1.0,) * self._base.microbatches,) * 2)
        return tasks_of(self._split, replace(self._costs, loads=alike))

    @cached_property
    def _places(self) -> Places:
        import numpy as np

        tasks, passes = self._tasks
        forward, backward, turned = tasks.arrays
        of_attention = self._costs.of_attention
        attention = np.array([of_attention[kind][stage] for stage, kind, _ in passes])
        # What the search overwrites stands in arrays of its own, one for both directions where they are alike.
        duration, change, copying = (np.array(each) for each in (forward.duration, forward.change, forward.copying))
        shared: dict[str, Any] = {"duration": duration.copy(), "copying": copying.copy()}
        changes: tuple[Any, Any] = change.copy(), -change
        forward, backward = (
            each._replace(change=own, **shared) for each, own in zip((forward, backward), changes, strict=True)
        )
        places, limits = np.array([work.microbatch for work in passes]), np.array(self._limits)
        return Places(Both(forward, backward, turned), places, duration - attention, attention, change, copying, limits)

    def usual(self, loads: MicrobatchLoads) -> LengthsPlan:
        """The base plan, its microbatches as they come."""
        return self._timed(tuple(range(self._base.microbatches)), self._base, loads)

    def plan(self, loads: MicrobatchLoads, effort: float = EFFORT) -> LengthsPlan:
        """The shortest plan found for microbatches of these ``loads``; the usual one where none is shorter.

        Args:
            loads: in the data loader's order.
            effort: how many passes are placed.

        Raises:
            PlanError: where there are more or fewer microbatches than in the base plan.
        """
        n = self._base.microbatches
        if len(loads.tokens) != n:
            given = counted(len(loads.tokens), "microbatch")
            raise PlanError(f"lengths of {given} given for a plan of {n}", "plan_lengths")
        usual = self.usual(loads)
        if loads.alike:
            return usual
        found = self._searched(loads, effort, self._limits) or self._searched(loads, effort, self._held(usual))
        if found is None:
            return usual
        order, rows = found
        split = replace(self._split, order=rows)
        planned = self._timed(order, split, loads)
        if self._base.splits:
            whole = finished(split, planned.timeline.costs)
            planned = replace(planned, timeline=simulate(whole, planned.timeline.costs))
        exceeds = any(a > b + EPSILON for a, b in zip(planned.timeline.peaks, self._held(usual), strict=True))
        return usual if exceeds or planned.timeline.makespan >= usual.timeline.makespan - EPSILON else planned

    def _searched(
        self, loads: MicrobatchLoads, effort: float, limits: Sequence[float]
    ) -> tuple[tuple[int, ...], Rows] | None:
        """An order of the microbatches and of the passes; None where no start keeps within ``limits``."""
        import numpy as np

        from megatron.schedules.search import compiled
        from megatron.schedules.search.microbatch_order import search

        tasks, passes = self._tasks
        ranks = self._base.ranks
        work, _ = compiled.work_for(self._places.both)
        found = search(
            compiled.compiled_climb(),
            self._places._replace(limits=np.array(limits)),
            work,
            loads,
            candidates(self._weights(loads)),
            max(_FEWEST_ROUNDS, int(effort / (len(passes) + 200))),
            max(16, 3 * ranks),
            _THRESHOLD * sum(self._costs.durations[Kind.F]) / (2 * ranks),
        )
        return found and (tuple(found.best_order.tolist()), tasks.rows(found.best_passes.tolist(), passes))

    def _held(self, usual: LengthsPlan) -> list[float]:
        """What each rank may hold, or holds in the usual plan where that is more."""
        return [max(pair) for pair in zip(self._limits, usual.timeline.peaks, strict=True)]

    def _timed(self, order: tuple[int, ...], schedule: Schedule, loads: MicrobatchLoads) -> LengthsPlan:
        return LengthsPlan(order, simulate(schedule, replace(self._costs, loads=loads.in_order(order))))

    def _weights(self, loads: MicrobatchLoads) -> list[float]:
        """How much computing each microbatch is, of all stages together."""
        kinds = [kind for kind in self._base.kinds if not KINDS[kind].optional]
        standard = sum(sum(self._costs.durations[kind]) for kind in kinds)
        attention = sum(sum(self._costs.of_attention[kind]) for kind in kinds)
        return [loads.time(standard, attention, m) for m in range(len(loads.tokens))]


def candidates(weights: Sequence[float]) -> list[list[int]]:
    """Orders of microbatches to begin a search with, each of all of them.

    Args:
        weights: how much computing each is.
    """
    n = len(weights)
    rising = sorted(range(n), key=lambda m: (weights[m], m))
    falling = rising[::-1]
    mountain = rising[::2] + rising[1::2][::-1]
    valley = falling[::2] + falling[1::2][::-1]
    in_turn = [m for pair in zip(rising, falling, strict=True) for m in pair][:n] if n % 2 == 0 else rising
    small_first = rising[: n // 4] + falling[: n - n // 4]
    both_ends = rising[: n // 4 : 2] + falling[: n - n // 4] + rising[1 : n // 4 : 2][::-1]
    found = [list(range(n)), rising, falling, mountain, valley, in_turn, small_first, both_ends]
    return [order for order in dict.fromkeys(map(tuple, found)) if sorted(order) == list(range(n))]  # type: ignore[misc]


def _split(schedule: Schedule) -> Schedule:
    """Every whole in its parts."""
    rows = (
        tuple(Pass(stage, part, m) for stage, kind, m in row for part in KINDS[kind].parts or (kind,))
        for row in schedule.order
    )
    return replace(schedule, order=tuple(rows))
