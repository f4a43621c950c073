"""A schedule: the order of the passes on every rank, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.schedules.planning.kinds import COUNTS_AS, KINDS, RELIEF, WHOLES, At, Kind, StageKind
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.placement import Placement

Rows = tuple[tuple[Pass, ...], ...]

# The kind that gets a stage's microbatches ready for passes of another.
_GOT_READY_BY = {kind: need.kinds[0] for kind, row in KINDS.items() for need in row.needs[:1] if need.at is At.SAME}


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order. Times follow from costs (:mod:`.simulate`), messages from lowering.

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
        return frozenset(work.kind for _, work in self.passes())

    @property
    def splits(self) -> bool:
        """Whether any pass is a part of what could be done as a whole: a backward is split."""
        return any(kind in self.kinds for parts in WHOLES for kind in parts)

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Every pass with its rank, rank by rank, in order."""
        for rank, row in enumerate(self.order):
            for work in row:
                yield rank, work


def in_microbatch_order(schedule: Schedule) -> Schedule:
    """The same schedule with its microbatches renumbered so that every stage does them in ascending order.

    Data come in order and gradients are added up in order, so results then equal 1F1B's to the bit. Microbatches are
    alike, so nothing else changes: where k passes of a stage have begun, k passes of the one they wait for have ended,
    whichever microbatches those were. Those are not alike that are done again or offloaded while others are not: such
    passes stay with their I, and where they would so come before their F the schedule is left as it is.
    """
    rows = tuple(map(_renumbered, schedule.order))
    return replace(schedule, order=rows) if all(map(_after_their_forwards, rows)) else schedule


def _renumbered(row: Sequence[Pass]) -> tuple[Pass, ...]:
    """Each pass of a rank on the first microbatch that its stage has got ready for it and no pass has had."""
    required = iter(_in_turn([work for work in row if work.kind not in RELIEF]))
    renumbered = [work if work.kind in RELIEF else next(required) for work in row]
    backwards = {
        (old.stage, old.microbatch): new.microbatch
        for old, new in zip(row, renumbered, strict=True)
        if COUNTS_AS[old.kind] is Kind.I
    }
    return tuple(
        work._replace(microbatch=backwards[work.stage, work.microbatch]) if work.kind in RELIEF else work
        for work in renumbered
    )


def _after_their_forwards(row: Sequence[Pass]) -> bool:
    """Whether what is optional comes after the forward of its microbatch."""
    forwards: set[tuple[int, int]] = set()
    for stage, kind, m in row:
        if kind is Kind.F:
            forwards.add((stage, m))
        if kind in RELIEF and (stage, m) not in forwards:
            return False
    return True


def _in_turn(row: Sequence[Pass]) -> list[Pass]:
    """:func:`_renumbered` of passes that every microbatch has."""
    done: dict[StageKind, list[int]] = defaultdict(list)
    begun: dict[StageKind, int] = defaultdict(int)
    renumbered = []
    for stage, kind, _ in row:
        counted = stage, COUNTS_AS[kind]
        m = number = begun[counted]
        if kind in _GOT_READY_BY:
            m = done[stage, _GOT_READY_BY[kind]][number]
        begun[counted] = number + 1
        done[stage, kind].append(m)
        renumbered.append(Pass(stage, kind, m))
    return renumbered


def gradients_complete(row: Sequence[Pass]) -> dict[int, int]:
    """For each stage of a rank with weight gradients, the index in its row of the pass that completes them."""
    return {work.stage: index for index, work in enumerate(row) if KINDS[work.kind].ends_gradients}
