"""The event simulator: when each pass of a schedule runs under given costs, what idles, what is held.

Every rank does its passes in order, each as soon as what it needs has ended (and, from another rank, has arrived one
hop later). That is all there is to it, so one sweep over the passes is enough.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.planning.costs import StageCosts
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.passes import Kind
from megatron.schedules.planning.schedule import Schedule

Times = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Timeline:
    """A schedule with the times of its passes.

    Args:
        schedule: what was timed.
        costs: what it was timed under.
        start, end: for each rank, the times of its passes in the schedule's order (the unit of the costs).
    """

    schedule: Schedule
    costs: StageCosts
    start: Times
    end: Times

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end on any rank."""
        return max((row[-1] for row in self.end if row), default=0.0)

    @cached_property
    def ideal(self) -> float:
        """Time an average rank computes: n * 2 * (F + B + W) where stages are even."""
        return sum(
            e - s for starts, ends in zip(self.start, self.end, strict=True) for s, e in zip(starts, ends, strict=True)
        ) / (self.schedule.ranks)

    @property
    def bubble(self) -> float:
        """1 - ideal / makespan: the share of the ranks' time that is idle."""
        return 1 - self.ideal / self.makespan

    @cached_property
    def span_bubble(self) -> float:
        """The papers' form: 1 - work / span on the worst rank, its span being from first start to last end."""
        rates = []
        for starts, ends in zip(self.start, self.end, strict=True):
            work = sum(e - s for s, e in zip(starts, ends, strict=True))
            rates.append(1 - work / (ends[-1] - starts[0]))
        return max(rates)

    def memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Activation memory of ``rank`` over time, as steps (time, microbatches held from then on).

        An activation is held from the start of its F to the end of its W (or B), less what its I gives back.
        """
        held, steps, changes = 0.0, [(0.0, 0.0)], self.costs.changes
        for work, start, end in zip(self.schedule.order[rank], self.start[rank], self.end[rank], strict=True):
            change = changes[work.kind][work.stage]
            held += change
            if change:
                steps.append((start if change > 0 else end, held))
        return tuple(steps)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Each rank's peak activation memory, in microbatches' worth of one rank's activations."""
        return peaks(self.schedule, self.costs)

    def gradients_complete(self, rank: int) -> tuple[float, ...]:
        """For each chunk of ``rank``, the end of its last W (or B): from then its gradients can be reduced."""
        ends = dict.fromkeys(self.schedule.placement.stages_of(rank), 0.0)
        for work, end in zip(self.schedule.order[rank], self.end[rank], strict=True):
            if work.kind in (Kind.W, Kind.B):
                ends[work.stage] = end
        return tuple(ends.values())

    @property
    def peak(self) -> float:
        """Peak activation memory of the worst rank; 1F1B's is min(n, d)."""
        return max(self.peaks)


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Each rank's peak activation memory in microbatches. It follows from the order alone; no times are needed."""
    found, changes = [], costs.changes
    for row in schedule.order:
        held = peak = 0.0
        for work in row:
            held += changes[work.kind][work.stage]
            peak = max(peak, held)
        found.append(round(peak, 9))
    return tuple(found)


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Time ``schedule`` under ``costs``. Time and memory are linear in the passes.

    Raises:
        PlanError: where the order cannot finish; it names the pass each blocked rank waits at.
    """
    start, end = sweep(schedule, costs)
    return Timeline(schedule, costs, start, end)


def sweep(schedule: Schedule, costs: StageCosts | None = None) -> tuple[Times, Times]:
    """Start and end of every pass, by rank; without ``costs`` every time is zero and only the order is proved."""
    rank_of, n, last = schedule.placement.rank_of, schedule.microbatches, schedule.placement.last_stage
    hop = costs.comm if costs else 0.0
    zero = (0.0,) * (last + 1)
    lengths = costs.durations if costs else dict.fromkeys(Kind, zero)
    forward_end: list[float | None] = [None] * ((last + 1) * n)
    backward_end: list[float | None] = [None] * ((last + 1) * n)
    starts: list[list[float]] = [[] for _ in schedule.order]
    ends: list[list[float]] = [[] for _ in schedule.order]
    clock = [0.0] * schedule.ranks
    waiting: dict[tuple[bool, int], int] = {}
    ready = deque(range(schedule.ranks))

    while ready:
        rank = ready.popleft()
        row, now = schedule.order[rank], clock[rank]
        for index in range(len(ends[rank]), len(row)):
            stage, kind, m = row[index]
            if kind is Kind.F:
                source = stage - 1 if stage else None
                is_forward = True
            else:
                source = stage + 1 if kind is not Kind.W and stage < last else None
                is_forward = False
            if source is not None:
                slot = source * n + m
                arrived = forward_end[slot] if is_forward else backward_end[slot]
                if arrived is None:
                    waiting[is_forward, slot] = rank
                    break
                now = max(now, arrived if rank_of[source] == rank else arrived + hop)
            starts[rank].append(now)
            now += lengths[kind][stage]
            ends[rank].append(now)
            if kind is not Kind.W:
                slot = stage * n + m
                (forward_end if is_forward else backward_end)[slot] = now
                woken = waiting.pop((is_forward, slot), None)
                if woken is not None:
                    ready.append(woken)
        clock[rank] = now

    stuck = [f"rank {r} at {row[len(ends[r])]}" for r, row in enumerate(schedule.order) if len(ends[r]) < len(row)]
    if stuck:
        raise PlanError(f"{schedule.name}: the order cannot finish: {', '.join(stuck[:4])} wait for each other")
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))
