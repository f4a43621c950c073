"""A schedule: the order of the passes on every rank, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from megatron.schedules.schedule.kinds import COUNTS_AS, KINDS, PARTS, SAVING, At, Kind, StageKind, sources
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import Placement

Rows = tuple[tuple[Pass, ...], ...]

# The kind that gets a stage's microbatches ready for passes of another.
_GOT_READY_BY = {kind: need.kinds[0] for kind, row in KINDS.items() for need in row.needs[:1] if need.at is At.SAME}


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order. Times follow from costs (:mod:`.simulator`), messages from lowering.

    Args:
        name: the name it was asked for by.
        placement: where its stages live.
        microbatches: n; every stage works on microbatches 0 .. n-1, each exactly once.
        order: for each rank its passes, first to last.
    """

    name: str
    placement: Placement
    microbatches: int
    order: Rows

    @property
    def ranks(self) -> int:
        """d, the number of pipeline ranks."""
        return self.placement.ranks

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its passes."""
        return frozenset(kind for row in self.order for _, kind, _ in row)

    @property
    def splits(self) -> bool:
        """Whether any pass is a part of what could be done as a whole: a backward is split."""
        return not self.kinds.isdisjoint(PARTS)

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Every pass with its rank, rank by rank, in order."""
        for rank, row in enumerate(self.order):
            for work in row:
                yield rank, work


def slots(placement: Placement, microbatches: int) -> dict[Kind, list[int]]:
    """Where passes stand in a flat list by kind, stage and microbatch: for each kind, by stage, microbatch 0's place.

    A whole stands where the first of its parts would: who waits for one waits for the other.
    """
    of_kind = placement.stages * microbatches
    first = {kind: at * of_kind for at, kind in enumerate(KINDS)}
    stages = range(placement.stages)
    return {kind: [first[counted] + stage * microbatches for stage in stages] for kind, counted in COUNTS_AS.items()}


def awaited(
    schedule: Schedule, latency: Callable[[int, int], float], *, own: bool
) -> dict[Kind, list[list[tuple[int, float]]]]:
    """For every kind and stage what passes wait for: microbatch 0's place by :func:`slots`, and the latency after it.

    Args:
        schedule: whose passes.
        latency: of a message from one rank to another, 0 within a rank.
        own: whether what they need on their own stage, which stands before them in their row, is told too.
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
    """By stage and kind, the rank and the place (:func:`slots`, of microbatch 0) of all that is awaited from others."""
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
    """The same schedule with its microbatches renumbered so that every stage does them in ascending order.

    Data come in order and gradients are added up in order, so results then equal 1F1B's to the bit. Microbatches are
    alike, so nothing else changes: where k passes of a stage have begun, k passes of the one they wait for have ended,
    whichever microbatches those were. Those are not alike that are recomputed or offloaded while others are not: such
    passes stay with their backwards, and where they would so come before their F the schedule is left as it is.
    """
    rows = tuple(map(_renumbered, schedule.order))
    return replace(schedule, order=rows) if all(map(_after_their_forwards, rows)) else schedule


def _renumbered(row: Sequence[Pass]) -> tuple[Pass, ...]:
    """Each pass of a rank on the first microbatch that its stage has got ready for it and no pass has had.

    What is optional stays with the backwards that have it, in their order.
    """
    if not any(work.kind in SAVING for work in row):
        return tuple(_in_turn(row))
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
    """Whether what is optional comes after the forward of its microbatch."""
    forwards: set[tuple[int, int]] = set()
    for stage, kind, m in row:
        if kind is Kind.F:
            forwards.add((stage, m))
        if kind in SAVING and (stage, m) not in forwards:
            return False
    return True


def _in_turn(row: Sequence[Pass]) -> list[Pass]:
    """:func:`_renumbered` of passes that every microbatch has."""
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
    return renumbered


def gradients_complete(row: Sequence[Pass]) -> dict[int, int]:
    """For each stage of a rank with weight gradients, the index in its row of the pass that completes them."""
    return {work.stage: index for index, work in enumerate(row) if KINDS[work.kind].ends_gradients}
