"""Plans the microbatches of one iteration: their order, and a schedule for that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import KINDS, Kind, Pass
from megatron.schedules.schedule.schedule import Rows, Schedule, all_split
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import MicrobatchLoads
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.polish import finished
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import Tasks, tasks_of
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted

if TYPE_CHECKING:
    from megatron.schedules.search.moves import Sizes

# Passes that a search schedules in all, about 0.3 s on a typical core. It is a count, so that all ranks find the same
# plan.
EFFORT = 2_400_000
_FEWEST_ROUNDS = 64
# The search continues from an order that is longer by up to this share of a forward over half a rank's layers.
_THRESHOLD = 0.25


@dataclass(frozen=True)
class LengthsPlan:
    """Order and schedule of the microbatches of an iteration.

    Args:
        order: the data loader's microbatch at each position k is ``order[k]``.
        timeline: the schedule with its times; its microbatch numbers are positions.
    """

    order: tuple[int, ...]
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """Order of the passes; their microbatch numbers are positions. Stages run positions in order."""
        return self.timeline.schedule


class LengthsPlanner:
    """Plans iterations that differ only in the lengths of their microbatches.

    Args:
        base: schedule for microbatches of equal length. Its placement, and if backwards are split, do not change.
        costs: costs of a standard microbatch.
        limit: activation memory limit of an average rank, in standard microbatches; by default the peak of ``base``.
        decisions: settled decisions about the stages of ``base``.
    """

    def __init__(self, base: Schedule, costs: Costs, limit: float | None = None, decisions: Decisions = PLAIN) -> None:
        self._base = base
        self._costs = costs.around_one().on(base.placement, decisions)
        most = simulate(base, self._costs).limit if limit is None else limit
        self._limits = self._costs.limits(base.placement, most)
        self._split = all_split(base)

    @property
    def limits(self) -> Sequence[float]:
        """Activation memory limit of each rank, in standard microbatches."""
        return self._limits

    @cached_property
    def _tasks(self) -> tuple[Tasks, list[Pass]]:
        """Tasks with standard times."""
        alike = MicrobatchLoads(*((1.0,) * self._base.microbatches,) * 2)
        return tasks_of(self._split, replace(self._costs, loads=alike))

    @cached_property
    def _standard(self) -> tuple[Rounds, Sizes]:
        """Rounds of the tasks, in arrays that the search overwrites, and the standard microbatch's part in them."""
        import numpy as np

        from megatron.schedules.search.moves import Sizes

        tasks, passes = self._tasks
        duration, copying, change = (np.array(column) for column in (tasks.duration, tasks.copying, tasks.change))
        of_attention = self._costs.of_attention
        attention = np.array([of_attention[kind][stage] for stage, kind, _ in passes])
        places, none = np.array([work.microbatch for work in passes]), np.zeros(0)
        message = np.array(tasks.message)
        sizes = Sizes(places, duration - attention, attention, change, copying, message, none, none)
        return Rounds(tasks, compiled=True).under(duration + copying, change.copy(), message.copy()), sizes

    def usual(self, loads: MicrobatchLoads) -> LengthsPlan:
        """Returns the base plan, with the microbatches in the order of the data loader."""
        return self._timed(tuple(range(self._base.microbatches)), self._base, loads)

    def plan(self, loads: MicrobatchLoads, effort: float = EFFORT) -> LengthsPlan:
        """Returns the shortest plan found for these microbatches, or the base plan if none is shorter.

        Args:
            loads: loads of the microbatches, in the order of the data loader.
            effort: number of passes that the search schedules.

        Raises:
            PlanError: if the number of microbatches is not that of the base plan.
        """
        n = self._base.microbatches
        if len(loads.tokens) != n:
            given = counted(len(loads.tokens), "microbatch")
            raise PlanError(f"lengths of {given} given for a plan of {n}", "plan_lengths")
        usual = self.usual(loads)
        if loads.alike:
            return usual
        searched = self._searched(loads, effort, self._limits) or self._searched(loads, effort, self._held(usual))
        if searched is None:
            return usual
        order, rows = searched
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
        """Order of the microbatches and of the passes; None if no start fits ``limits``."""
        import numpy as np

        from megatron.schedules.search.microbatch_order import search

        (tasks, passes), (rounds, sizes) = self._tasks, self._standard
        ranks = self._base.ranks
        result = search(
            rounds,
            np.array(limits),
            sizes._replace(tokens=np.array(loads.tokens), squares=np.array(loads.squares)),
            candidates(self._weights(loads)),
            max(_FEWEST_ROUNDS, int(effort / (len(passes) + 200))),
            max(16, 3 * ranks),
            _THRESHOLD * sum(self._costs.durations[Kind.F]) / (2 * ranks),
        )
        if result is None:
            return None
        return tuple(result.microbatches.tolist()), tasks.rows(result.best.tolist(), passes)

    def _held(self, usual: LengthsPlan) -> list[float]:
        """Memory limit of each rank, or its peak in the base plan if that is larger."""
        return [max(pair) for pair in zip(self._limits, usual.timeline.peaks, strict=True)]

    def _timed(self, order: tuple[int, ...], schedule: Schedule, loads: MicrobatchLoads) -> LengthsPlan:
        return LengthsPlan(order, simulate(schedule, replace(self._costs, loads=loads.in_order(order))))

    def _weights(self, loads: MicrobatchLoads) -> list[float]:
        """Computing time of each microbatch, summed over all stages."""
        kinds = [kind for kind in self._base.kinds if not KINDS[kind].optional]
        standard = sum(sum(self._costs.durations[kind]) for kind in kinds)
        attention = sum(sum(self._costs.of_attention[kind]) for kind in kinds)
        return [loads.time(standard, attention, m) for m in range(len(loads.tokens))]


def candidates(weights: Sequence[float]) -> list[list[int]]:
    """Start orders of the search; each contains all microbatches.

    Args:
        weights: computing time of each microbatch.
    """
    n = len(weights)
    rising = sorted(range(n), key=lambda m: (weights[m], m))
    falling = rising[::-1]
    mountain = rising[::2] + rising[1::2][::-1]
    valley = falling[::2] + falling[1::2][::-1]
    in_turn = [m for pair in zip(rising, falling, strict=True) for m in pair][:n] if n % 2 == 0 else rising
    small_first = rising[: n // 4] + falling[: n - n // 4]
    both_ends = rising[: n // 4 : 2] + falling[: n - n // 4] + rising[1 : n // 4 : 2][::-1]
    orders = [list(range(n)), rising, falling, mountain, valley, in_turn, small_first, both_ends]
    return [order for order in dict.fromkeys(map(tuple, orders)) if sorted(order) == list(range(n))]  # type: ignore[misc]
