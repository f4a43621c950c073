"""Event simulator: start and end of each pass, idle time and activation memory of a schedule under given costs.

Every rank runs its passes in order. A pass starts as soon as its dependencies have ended; those from another rank
arrive one P2P latency later. One sweep over the passes is therefore enough.

A rank has one clock for computation and one for each copy channel. A copy to the host begins when its forward has
ended and the channel is free; at its position in the order computation waits for its end. A copy from the host begins
at its position, and the pass that needs it waits. So activation memory depends only on the order.

Weight gradients run behind messages of experts as :mod:`.hidden_messages` says, so a W takes only what is left of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from operator import sub
from typing import NamedTuple

from megatron.schedules.schedule.hidden_messages import hide
from megatron.schedules.schedule.kinds import COMPUTING, KINDS, Pass, Resource
from megatron.schedules.schedule.schedule import Rows, Schedule, awaited, slots
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError

Times = tuple[tuple[float, ...], ...]


class Copy(NamedTuple):
    """Pass that copies, with its start and its end."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Schedule with the times of its passes.

    Args:
        schedule: the schedule.
        costs: costs of its stages.
        start, end: start and end of each pass, by rank in the schedule's order, in the unit of the costs. For a copy
            both are the time at which computation continues after its position.
        copies: copies of each rank, in the order in which they begin.
    """

    schedule: Schedule
    costs: StageCosts
    start: Times
    end: Times
    copies: tuple[tuple[Copy, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Iteration time: from time 0 to the last end on any rank."""
        return max((row[-1] for row in self.end if row), default=0.0)

    @cached_property
    def ideal(self) -> float:
        """Computing time of an average rank: n * 2 * (F + I + W) for even stages, plus R passes."""
        return sum(self._busy) / self.schedule.ranks

    @cached_property
    def least_bubble(self) -> float:
        """Bubble of every order in which the rank that computes most is never idle; 0 for even ranks."""
        return 1 - self.ideal / max(self._busy)

    @cached_property
    def _busy(self) -> list[float]:
        """Computing time of each rank, without copies."""
        return [sum(map(sub, ends, starts)) for starts, ends in zip(self.start, self.end, strict=True)]

    @property
    def bubble(self) -> float:
        """Bubble ratio, 1 - ideal / makespan: the share of the ranks' time in which they do not compute."""
        return max(0.0, 1 - self.ideal / self.makespan)  # rounding could make it negative

    @cached_property
    def span_bubble(self) -> float:
        """Bubble ratio as papers define it: 1 - work / span of the worst rank. Its span is first start to last end."""
        rows = zip(self._busy, self.start, self.end, strict=True)
        return max(0.0, *(1 - busy / (ends[-1] - starts[0]) for busy, starts, ends in rows))

    @cached_property
    def recomputed(self) -> float:
        """Share of the computing time that R passes take. Papers count only the rest as work."""
        kinds = {kind for kind in self.schedule.kinds if KINDS[kind].spares}
        recomputed = [work for _, work in self.schedule.passes() if work.kind in kinds] if kinds else []
        return sum(self.costs.durations_of(recomputed)) / (self.ideal * self.schedule.ranks)

    @property
    def useful(self) -> float:
        """Share of the ranks' time in which they compute, without recompute passes."""
        return (1 - self.bubble) * (1 - self.recomputed)

    @cached_property
    def copying(self) -> float:
        """Share of the makespan in which the busiest copy channel of any rank is in use; 0 without copies."""
        busy: dict[tuple[int, Resource | None], float] = defaultdict(float)
        for rank, copies in enumerate(self.copies):
            for work, start, end in copies:
                busy[rank, None if self.costs.one_way else KINDS[work.kind].resource] += end - start
        return max(busy.values(), default=0.0) / self.makespan

    @cached_property
    def hidden(self) -> tuple[float, ...]:
        """For each rank, the time of its experts' messages in which weight gradients run."""
        return tuple(sum(hide(row, self.costs).hidden) for row in self.schedule.order)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, the time in which it waits for its experts' messages and computes nothing."""
        messages = [sum(self.costs.messages_of(row)) for row in self.schedule.order]
        return tuple(max(0.0, time - hidden) for time, hidden in zip(messages, self.hidden, strict=True))

    @property
    def messages(self) -> tuple[float, float]:
        """Shares of the makespan in which an average rank's experts' messages are hidden, and exposed."""
        if not self.costs.has_messages:
            return 0.0, 0.0
        whole = self.schedule.ranks * self.makespan
        return sum(self.hidden) / whole, sum(self.exposed) / whole

    def memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Activation memory of ``rank`` over time, as steps (time, memory in microbatches from then on).

        Activations are allocated at the start of F. I frees a part at its end, W (or B) the rest.
        """
        return held_over_time(self.costs.changes_of(self.schedule.order[rank]), self.start[rank], self.end[rank])

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Peak activation memory of each rank, in microbatches (of one rank's activations)."""
        return peaks(self.schedule, self.costs)

    @cached_property
    def limit(self) -> float:
        """Smallest memory limit that it satisfies. It exceeds the peak if that rank has many parameters."""
        return self.costs.within(self.schedule.placement, self.peaks)

    @property
    def peak(self) -> float:
        """Peak activation memory of the worst rank. For 1F1B it is d, with at least d microbatches."""
        return max(self.peaks)

    @property
    def of_1f1b(self) -> float | None:
        """The peak as a fraction of 1F1B's d; None under Megatron's own recompute, where the job's 1F1B holds less."""
        return None if self.costs.passing else self.peak / self.schedule.ranks


def held_over_time(
    changes: Iterable[float], start: Iterable[float], end: Iterable[float]
) -> tuple[tuple[float, float], ...]:
    """Returns the memory of a rank as steps (time, memory from then on).

    A pass allocates at its start and frees at its end.

    Args:
        changes: change of memory by each pass of the rank, in order.
        start, end: times of the same passes.
    """
    held, steps = 0.0, [(0.0, 0.0)]
    for change, begun, over in zip(changes, start, end, strict=True):
        held += change
        if change:
            steps.append((begun if change > 0 else over, held))
    return tuple(steps)


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Returns the peak activation memory of each rank, in microbatches. It depends only on the order, not on times."""
    return tuple(round(max(accumulate(costs.changes_of(row)), default=0.0), 9) for row in schedule.order)


def whole_peaks(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Returns the peaks of :func:`peaks` with the temporary memory of Megatron's own recompute in backward passes."""
    return tuple(whole_peak(row, costs.changes_of(row), costs) for row in schedule.order)


def whole_peak(passes: Sequence[Pass], changes: Sequence[float], costs: StageCosts, held: float = 0.0) -> float:
    """Works like :func:`whole_peaks` for ``passes`` of one rank, with ``held`` before them and these ``changes``."""
    if not costs.passing:
        return max(accumulate(changes, initial=held))
    most = before = held
    for (stage, kind, _), after in zip(passes, islice(accumulate(changes, initial=held), 1, None), strict=True):
        extra = costs.passing[kind][stage] if kind in costs.passing else 0.0
        most = max(most, before + extra, after)
        before = after
    return most


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Simulates ``schedule`` under ``costs``. The simulation's time and memory are linear in the number of passes.

    Raises:
        PlanError: if the order deadlocks; it names the pass at which each blocked rank waits.
    """
    swept = sweep(schedule, costs)
    return Timeline(schedule, costs, swept.start, swept.end, swept.copies)


def _at_once(source: int, to: int) -> float:
    """Latency without costs: 0."""
    return 0.0


class Sweep(NamedTuple):
    """Result of :func:`sweep`, by rank.

    Args:
        start, end: times of each pass.
        turns: position of each pass in one sequence of all passes in which dependencies come first.
        copies: copies in the order in which they begin.
    """

    start: Times
    end: Times
    turns: Sequence[Sequence[int]]
    copies: tuple[tuple[Copy, ...], ...]


def sweep(schedule: Schedule, costs: StageCosts | None = None) -> Sweep:
    """Returns start and end of every pass. Without ``costs`` all times are zero and only deadlocks are checked."""
    lengths = [hide(row, costs).durations if costs else [0.0] * len(row) for row in schedule.order]
    places = slots(schedule.placement, schedule.microbatches)
    works = {
        kind: list(zip(needs, places[kind], strict=True))
        for kind, needs in awaited(schedule, costs.latency if costs else _at_once, own=False).items()
    }
    copied = zip(_with_copies(schedule), lengths, strict=False)
    channels = [_Channels(row, times, bool(costs and costs.one_way)) for row, times in copied]
    ended: list[float | None] = [None] * (len(KINDS) * schedule.placement.stages * schedule.microbatches)
    starts: list[list[float]] = [[] for _ in schedule.order]
    ends: list[list[float]] = [[] for _ in schedule.order]
    clock = [0.0] * schedule.ranks
    waiting: dict[int, list[int]] = {}
    turns: list[list[int]] = [[] for _ in schedule.order]
    done = 0
    ready = deque(range(schedule.ranks))

    while ready:
        rank = ready.popleft()
        row, now, copying = schedule.order[rank], clock[rank], channels[rank] if channels else None
        begun, over, turn, times = starts[rank], ends[rank], turns[rank], lengths[rank]
        for index in range(len(over), len(row)):
            stage, kind, m = row[index]
            needs, slot = works[kind][stage]
            begin = now
            for base, latency in needs:
                arrived = ended[base + m]
                if arrived is None:
                    waiting.setdefault(base + m, []).append(rank)
                    break
                if arrived + latency > begin:
                    begin = arrived + latency
            else:
                if copying is None:
                    now = begin + times[index]
                else:
                    begin, now = copying.took(row[index], begin)
                begun.append(begin)
                over.append(now)
                slot += m
                ended[slot] = now
                if slot in waiting:
                    ready.extend(waiting.pop(slot))
                continue
            break
        clock[rank] = now
        fresh = len(over) - len(turn)
        turn.extend(range(done, done + fresh))
        done += fresh

    stuck = [f"rank {r} at {row[len(ends[r])]}" for r, row in enumerate(schedule.order) if len(ends[r]) < len(row)]
    if stuck:
        raise PlanError(f"{schedule.name}: the order cannot finish: {', '.join(stuck[:4])} wait for each other")
    copies = tuple(tuple(of_rank.copies) for of_rank in channels)
    return Sweep(tuple(map(tuple, starts)), tuple(map(tuple, ends)), turns, copies)


def _with_copies(schedule: Schedule) -> Rows:
    """Rows of ``schedule`` if it has copies; empty if it only computes."""
    return () if schedule.kinds <= COMPUTING else schedule.order


class _Channels:
    """Copy channels of one rank.

    Args:
        row: passes of the rank.
        lengths: duration of each pass.
        one_way: whether both directions share one channel.
    """

    def __init__(self, row: Sequence[Pass], lengths: Sequence[float], one_way: bool) -> None:
        self.copies: list[Copy] = []
        self._lengths = dict(zip(row, lengths, strict=True))
        own_channels = {resource: resource for resource in Resource}
        self._channel = dict.fromkeys(Resource, Resource.TO_HOST) if one_way else own_channels
        self._free = dict.fromkeys(Resource, 0.0)
        # Copies to the host, by the pass that they wait for: they begin as soon as possible.
        self._at_once = {
            Pass(stage, needed, m): Pass(stage, kind, m)
            for stage, kind, m in row
            if KINDS[kind].resource is Resource.TO_HOST
            for need in KINDS[kind].needs
            for needed in need.kinds
        }
        self._ends: dict[Pass, float] = {}

    def took(self, work: Pass, begin: float) -> tuple[float, float]:
        """Start and end of ``work`` in computing time; it starts at ``begin`` at the earliest."""
        stage, kind, m = work
        resource = KINDS[kind].resource
        if resource is Resource.TO_HOST:
            end = begin = max(begin, self._ends.pop(work))
        elif resource is Resource.FROM_HOST:
            end = begin
            self._copy(work, begin)
        else:
            for loaded in _LOADED_FOR.get(kind, ()):
                begin = max(begin, self._ends.pop(Pass(stage, loaded, m), 0.0))
            end = begin + self._lengths[work]
        following = self._at_once.get(work)
        if following is not None:
            self._copy(following, end)
        return begin, end

    def _copy(self, work: Pass, earliest: float) -> None:
        channel = self._channel[KINDS[work.kind].resource]
        start = max(earliest, self._free[channel])
        self._ends[work] = self._free[channel] = start + self._lengths[work]
        self.copies.append(Copy(work, start, self._free[channel]))


# Copies from the host that passes of each kind wait for.
_LOADED_FOR = {
    kind: [needed for need in row.needs for needed in need.kinds if KINDS[needed].resource is Resource.FROM_HOST]
    for kind, row in KINDS.items()
}
