"""Schedule: the order of the passes on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from operator import itemgetter

from megatron.schedules.schedule.kinds import COUNTS_AS, KINDS, PARTS, SAVING, At, Kind, Pass, StageKind, sources
from megatron.schedules.schedule.placement import Placement

Rows = tuple[tuple[Pass, ...], ...]

# For each kind, the kind on the same stage that must come first for a microbatch.
_GOT_READY_BY = {kind: need.kinds[0] for kind, row in KINDS.items() for need in row.needs[:1] if need.at is At.SAME}


@dataclass(frozen=True)
class Schedule:
    """Order of the passes on each rank. Times follow from costs (:mod:`.simulator`), messages from lowering.

    Args:
        name: name of the schedule, as requested.
        placement: map from stages to ranks.
        microbatches: n; every stage processes each of the microbatches 0 .. n-1 exactly once.
        order: passes of each rank, first to last.
    """

    name: str
    placement: Placement
    microbatches: int
    order: Rows

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks, d."""
        return self.placement.ranks

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of its passes."""
        return frozenset(map(itemgetter(1), chain.from_iterable(self.order)))

    @property
    def splits(self) -> bool:
        """True if any backward is split into I and W."""
        return not self.kinds.isdisjoint(PARTS)

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Yields (rank, pass), rank by rank, in order."""
        for rank, row in enumerate(self.order):
            for work in row:
                yield rank, work


def all_split(schedule: Schedule) -> Schedule:
    """Splits each B into I and W if any is split, since a B could add gradients before a W."""
    if not schedule.splits:
        return schedule
    rows = (
        tuple(Pass(stage, part, m) for stage, kind, m in row for part in KINDS[kind].parts or (kind,))
        for row in schedule.order
    )
    return replace(schedule, order=tuple(rows))


def slots(placement: Placement, microbatches: int) -> dict[Kind, list[int]]:
    """Positions in a flat list of passes by kind, stage and microbatch: for each kind and stage, that of microbatch 0.

    A combined kind has the position of its first part, because the same passes depend on either.
    """
    of_kind = placement.stages * microbatches
    first = {kind: at * of_kind for at, kind in enumerate(KINDS)}
    stages = range(placement.stages)
    return {kind: [first[counted] + stage * microbatches for stage in stages] for kind, counted in COUNTS_AS.items()}


def awaited(
    schedule: Schedule, latency: Callable[[int, int], float], *, own: bool
) -> dict[Kind, list[list[tuple[int, float]]]]:
    """Dependencies of the passes of every kind and stage: position of microbatch 0 by :func:`slots`, and latency.

    Args:
        latency: function of two ranks, the latency of a message from the first to the second; 0 within a rank.
        own: whether to include dependencies on the same stage, which come earlier in the same row.
    """
    placement = schedule.placement
    rank_of, places = placement.rank_of, slots(placement, schedule.microbatches)
    return {
        kind: [
            [
                (places[kinds[0]][source], latency(rank_of[source], rank_of[stage]))
                for source, kinds in sources(kind, stage, placement, schedule.kinds)
                if own or source != stage
            ]
            for stage in range(placement.stages)
        ]
        for kind in schedule.kinds
    }


def awaited_elsewhere(schedule: Schedule) -> dict[StageKind, list[tuple[int, int]]]:
    """Dependencies on other ranks by stage and kind: rank, and position of microbatch 0 by :func:`slots`."""
    placement = schedule.placement
    rank_of, places = placement.rank_of, slots(placement, schedule.microbatches)
    return {
        (stage, kind): [
            (rank_of[source], places[kinds[0]][source])
            for source, kinds in sources(kind, stage, placement, schedule.kinds)
            if rank_of[source] != rank_of[stage]
        ]
        for kind in schedule.kinds
        for stage in range(placement.stages)
    }


def in_microbatch_order(schedule: Schedule) -> Schedule:
    """Returns the schedule with its microbatches renumbered so that every stage processes them in ascending order.

    Data arrive in order and gradients are added in order, so results are bit-identical to those of 1F1B. All
    microbatches cost the same, so the times do not change: when k passes of a stage have begun, k passes of the stage
    they depend on have ended.

    R, O and L passes, which only some microbatches have, stay with their backwards. If one of them would then come
    before its F, the schedule is returned unchanged.
    """
    if schedule.kinds.isdisjoint(SAVING):
        return replace(schedule, order=tuple(map(_in_turn, schedule.order)))
    rows = tuple(map(_renumbered, schedule.order))
    return replace(schedule, order=rows) if all(map(_after_their_forwards, rows)) else schedule


def _renumbered(row: Sequence[Pass]) -> tuple[Pass, ...]:
    """Gives each pass of a rank the first ready microbatch. Optional passes stay with their backwards."""
    required = iter(_in_turn([work for work in row if work.kind not in SAVING]))
    renumbered = [work if work.kind in SAVING else next(required) for work in row]
    there = {work for work in row if work.kind in SAVING}
    backwards = [
        (old, new.microbatch) for old, new in zip(row, renumbered, strict=True) if COUNTS_AS[old.kind] is Kind.I
    ]
    turns = {
        (stage, kind): iter([m for old, m in backwards if old.stage == stage and old._replace(kind=kind) in there])
        for stage, kind in {(stage, kind) for stage, kind, _ in there}
    }
    return tuple(
        work._replace(microbatch=next(turns[work.stage, work.kind])) if work.kind in SAVING else work
        for work in renumbered
    )


def _after_their_forwards(row: Sequence[Pass]) -> bool:
    """True if every optional pass comes after the forward of its microbatch."""
    forwards: set[tuple[int, int]] = set()
    for stage, kind, m in row:
        if kind is Kind.F:
            forwards.add((stage, m))
        if kind in SAVING and (stage, m) not in forwards:
            return False
    return True


def _in_turn(row: Sequence[Pass]) -> tuple[Pass, ...]:
    """Does :func:`_renumbered` for passes that every microbatch has."""
    done: dict[StageKind, list[int]] = defaultdict(list)
    ready: dict[StageKind, Iterator[int]] = {}
    of_kind: dict[StageKind, tuple[Iterator[int], Callable[[int], None]]] = {}
    for stage, kind in {(stage, kind) for stage, kind, _ in row}:
        before, counted = _GOT_READY_BY.get(kind), (stage, COUNTS_AS[kind])
        ready.setdefault(counted, count() if before is None else iter(done[stage, before]))
        of_kind[stage, kind] = ready[counted], done[stage, kind].append
    renumbered = []
    for work in row:
        stage, kind, number = work
        turn, note = of_kind[stage, kind]
        m = next(turn)
        note(m)
        renumbered.append(work if m == number else Pass(stage, kind, m))
    return tuple(renumbered)


def gradients_complete(row: Sequence[Pass]) -> dict[int, int]:
    """For each stage with weight gradients, the index in the rank's row of the pass that completes them."""
    return {work.stage: index for index, work in enumerate(row) if KINDS[work.kind].ends_gradients}
