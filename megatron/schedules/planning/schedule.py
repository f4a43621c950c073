"""A schedule: the order of the passes on every rank, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.schedules.planning.kinds import COUNTS_AS, KINDS, WHOLES, At, Kind, StageKind
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
    whichever microbatches those were.
    """
    return replace(schedule, order=tuple(map(_renumbered, schedule.order)))


def _renumbered(row: Sequence[Pass]) -> tuple[Pass, ...]:
    """Each pass of a rank on the first microbatch that its stage has got ready for it and no pass has had."""
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
    return tuple(renumbered)


def gradients_complete(row: Sequence[Pass]) -> dict[int, int]:
    """For each stage of a rank with weight gradients, the index in its row of the pass that completes them."""
    return {work.stage: index for index, work in enumerate(row) if KINDS[work.kind].ends_gradients}
