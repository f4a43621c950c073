"""Joining: makes one B of an I and its W where no other rank has a use for the split.

A split lets other ranks go on before a weight gradient. Where none waits for that, it only takes time and memory, so
the two are joined, at the best place between them. The schedule gets no longer, no rank's peak gets higher, and each
stage's gradients are summed in the same order.

Costs are estimates, and a message planned to arrive just in time arrives too late in a job. So a join may delay a
message only if it still arrives a while ahead of its use. For more of them to do so, passes are first moved to later
times: as late as the end of the schedule allows if every message takes that while longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megatron.schedules.schedule.kinds import (
    COMPUTING,
    KINDS,
    OF_RANKS,
    PARTS,
    Kind,
    Pass,
    StageKind,
    everywhere,
    followers,
)
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule, awaited_elsewhere, slots
from megatron.schedules.schedule.simulator import Sweep, sweep, whole_peak
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import EPSILON

# Part of an average weight gradient: how far ahead of its use a delayed message arrives. If passes then take 5% more or
# less than planned, and messages a tenth of a forward more, simulated schedules take 0.1% more than with all backwards
# split. Without it they take up to 4% more.
_AHEAD = 1 / 4
# Of each stage this microbatch's backward stays split: jobs that measure themselves see I, W and B on every stage.
_STAYS_SPLIT = 1
# Most passes between an I and its W. A W further away fills a gap in the work of its rank, which a B would not.
_BETWEEN = 12


def joined(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Returns ``schedule`` with an I and its W as one B wherever that delays nothing that matters.

    Where passes copy in the background or wait for messages of experts, none is moved: what they hide depends on their
    places.
    """
    if schedule.kinds.isdisjoint(PARTS):
        return schedule
    joining = _Joining(schedule, costs)
    return replace(schedule, order=tuple(tuple(joining.row(rank)) for rank in range(schedule.ranks)))


class _Order(NamedTuple):
    """An order of a B and the passes that were between its parts.

    Args:
        passes: in order.
        times: start and end of each.
        ahead: how far ahead of its use a delayed message arrives at least.
    """

    passes: Sequence[Pass]
    times: Sequence[tuple[float, float]]
    ahead: float


class _Times:
    """Start and end of every pass, by position (:func:`.slots`), and who waits for whom.

    Passes that there are not start later than any.

    Attributes:
        start, end: as above.
        awaited, waiting: passes on other ranks that one of (stage, kind) waits for, and that wait for it: position of
            microbatch 0, and latency.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts, swept: Sweep) -> None:
        where, latency = schedule.placement, costs.latency
        self._places, rank_of = slots(where, schedule.microbatches), where.rank_of
        self.start = [math.inf] * (len(KINDS) * where.stages * schedule.microbatches)
        self.end = self.start.copy()
        for row, starts, ends in zip(schedule.order, swept.start, swept.end, strict=True):
            for work, start, end in zip(row, starts, ends, strict=True):
                self.keep(work, start, end)
        self.awaited = {
            (stage, kind): [(base, latency(rank, rank_of[stage])) for rank, base in needs]
            for (stage, kind), needs in awaited_elsewhere(schedule).items()
        }
        self.awaited |= {(stage, Kind.B): self.awaited[stage, Kind.I] for stage in range(where.stages)}
        self.waiting = {
            (stage, kind): [
                (self._places[user][other], latency(rank_of[stage], rank_of[other]))
                for other, user in after
                if rank_of[other] != rank_of[stage]
            ]
            for (stage, kind), after in _waiting_for(where).items()
        }

    def at(self, work: Pass) -> int:
        """Returns the position of ``work``."""
        return self._places[work.kind][work.stage] + work.microbatch

    def keep(self, work: Pass, start: float, end: float) -> None:
        """Sets the times of ``work``."""
        at = self.at(work)
        self.start[at], self.end[at] = start, end

    def postpone(self, schedule: Schedule, swept: Sweep, ahead: float, weights: Sequence[float]) -> None:
        """Moves passes to later times, so that a rank may compute ``weights`` before it sends a gradient.

        ``weights`` are times, by rank. No pass ends so late that, with messages that take ``ahead`` longer, the
        schedule would. Of two lists of times that keep all dependencies, the smaller of each pass's two times, or the
        larger, do too.
        """
        where, start, end = schedule.placement, self.start, self.end
        turns = sorted((turn, rank, at) for rank, row in enumerate(swept.turns) for at, turn in enumerate(row))
        order = [(rank, schedule.order[rank][at]) for _, rank, at in turns]
        room = {self._places[Kind.I][s]: ahead + weights[where.rank_of[s]] for s in range(where.stages)}
        delayed, clock = [0.0] * len(start), [0.0] * where.ranks
        for rank, work in order:
            begin, at = clock[rank], self.at(work)
            for base, latency in self.awaited[work.stage, work.kind]:
                begin = max(begin, delayed[base + work.microbatch] + latency + room.get(base, 0.0))
            delayed[at] = clock[rank] = begin + end[at] - start[at]
        makespan = max(row[-1] for row in swept.end if row)
        latest, clock = [makespan] * len(start), [makespan] * where.ranks
        for rank, work in reversed(order):
            at = self.at(work)
            finish, length = min(latest[at], clock[rank]), end[at] - start[at]
            clock[rank] = finish - length
            for base, latency in self.awaited[work.stage, work.kind]:
                source = base + work.microbatch
                latest[source] = min(latest[source], clock[rank] - latency - ahead)
            end[at] = min(delayed[at], max(end[at], finish))
            start[at] = end[at] - length


class _Joining:
    """Rows of a schedule whose passes start no later than at given times."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self._schedule, self._costs, self._placement = schedule, costs, schedule.placement
        weights = costs.durations[Kind.W]
        self._ahead = _AHEAD * sum(weights) / len(weights)
        self._moves = schedule.kinds <= COMPUTING and not costs.has_messages
        swept = sweep(schedule, costs)
        self._times = _Times(schedule, costs, swept)
        if self._moves:
            stages = map(self._placement.stages_of, range(schedule.ranks))
            by_rank = [sum(weights[stage] for stage in own) for own in stages]
            self._times.postpone(schedule, swept, self._ahead, by_rank)

    def row(self, rank: int) -> list[Pass]:
        """Returns the passes of ``rank``, with those joined that can be."""
        row, times = list(self._schedule.order[rank]), self._times
        memory, held = _Memory(row, self._costs), 0.0
        for index, work in enumerate(row):  # which gets shorter meanwhile
            if (between := self._between(row, index)) is not None:
                clock = times.end[times.at(row[index - 1])] if index else 0.0
                best = self._best(work, between, clock, memory, held)
                if best is not None:
                    row[index : index + len(best.passes) + 1] = best.passes
                    for moved, (start, end) in zip(best.passes, best.times, strict=True):
                        times.keep(moved, start, end)
            held += memory.changes[row[index]]
        return row

    def _between(self, row: Sequence[Pass], index: int) -> Sequence[Pass] | None:
        """Returns the passes between an I at ``index`` and its W; None if it is none, or stays as it is."""
        own, kind, m = row[index]
        if kind is not Kind.I or m == _STAYS_SPLIT:
            return None
        weight, following = Pass(own, Kind.W, m), row[index + 1 : index + 2 + _BETWEEN]
        if weight not in following:
            return None
        between = following[: following.index(weight)]
        # Collectives have one order on all ranks.
        fixed = not self._moves or any(kind in OF_RANKS for _, kind, _ in between)
        return None if between and fixed else between

    def _best(self, work: Pass, between: Sequence[Pass], clock: float, memory: _Memory, held: float) -> _Order | None:
        """Returns the order whose delayed messages have the most time left; None if no order will do.

        Args:
            work: an I.
            between: passes between it and its W.
            clock: when the pass before it ends.
            memory, held: of the rank, and what is held then.
        """
        stage, _, m = work
        best, until = None, self._times.end[self._times.at(Pass(stage, Kind.W, m))]
        for place in self._places_in(between, work):
            passes = [*between[:place], Pass(stage, Kind.B, m), *between[place:]]
            order = self._timed(passes, clock, until)
            if order is not None and (best is None or order.ahead > best.ahead + EPSILON) and memory.fits(passes, held):
                best = order
        return best

    def _places_in(self, between: Sequence[Pass], work: Pass) -> range:
        """Returns the places for the B of ``work``: behind a W of its stage, ahead of an I and of what waits for it."""
        own, _, m = work
        waiting = _waiting_for(self._placement).get((own, Kind.I), ())
        first, last = 0, len(between)
        for place, (stage, kind, other) in enumerate(between):
            if stage == own and kind in (Kind.W, Kind.B):
                first = place + 1
            if (stage == own and kind in (Kind.I, Kind.B)) or (other == m and (stage, kind) in waiting):
                last = min(last, place)
        return range(first, last + 1)

    def _timed(self, passes: Sequence[Pass], clock: float, until: float) -> _Order | None:
        """Returns ``passes`` with their times after ``clock``; None if they delay what comes after ``until``."""
        found, ahead, times = [], math.inf, self._times
        for work, length in zip(passes, self._costs.durations_of(passes), strict=True):
            stage, kind, m = work
            at = times.at(work)
            begin = clock if self._moves else times.start[at]  # which also waits for copies
            for base, latency in times.awaited[stage, kind]:
                begin = max(begin, times.end[base + m] + latency)
            clock = begin + length
            if clock > times.end[at] + EPSILON:
                for base, latency in times.waiting.get((stage, kind), ()):
                    ahead = min(ahead, times.start[base + m] - latency - clock)
                if ahead < self._ahead - EPSILON:
                    return None
            found.append((begin, clock))
        return _Order(passes, found, ahead) if clock <= until + EPSILON else None


class _Memory:
    """Activation memory of a rank, which no new order exceeds.

    Args:
        row: passes of the rank.
        costs: of its stages.

    Attributes:
        changes: microbatches that each pass takes or, if negative, gives, also each B that may come of an I and a W.
    """

    def __init__(self, row: Sequence[Pass], costs: StageCosts) -> None:
        self._costs = costs
        self.changes = dict(zip(row, costs.changes_of(row), strict=True))
        for stage, kind, m in row:
            if kind is Kind.W:
                own = self.changes[Pass(stage, Kind.I, m)] + self.changes[Pass(stage, Kind.W, m)]
                self.changes[Pass(stage, Kind.B, m)] = own
        self._most = self._peaks(row, 0.0)

    def fits(self, passes: Sequence[Pass], held: float) -> bool:
        """Returns whether the peak gets no higher by ``passes``, with ``held`` before them."""
        pairs = zip(self._peaks(passes, held), self._most, strict=True)
        return all(own <= most + EPSILON for own, most in pairs)

    def _peaks(self, passes: Sequence[Pass], held: float) -> tuple[float, float]:
        """Returns the peak without, and with, what Megatron's own recompute takes during passes."""
        changes = [self.changes[work] for work in passes]
        return max(accumulate(changes, initial=held)), whole_peak(passes, changes, self._costs, held)


@lru_cache(16)
def _waiting_for(placement: Placement) -> Mapping[StageKind, Sequence[StageKind]]:
    """For each pass of a microbatch, the passes that wait for it."""
    return followers(placement, everywhere(placement))
