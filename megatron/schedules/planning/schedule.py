"""A schedule: the order of the passes on every rank, and nothing else."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.placement import Placement

Order = tuple[tuple[Pass, ...], ...]


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
    order: Order

    @property
    def ranks(self) -> int:
        """d, the number of pipeline ranks."""
        return self.placement.ranks

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Every pass with its rank, rank by rank, in order."""
        for rank, row in enumerate(self.order):
            for work in row:
                yield rank, work


def in_turn(schedule: Schedule) -> Schedule:
    """The same schedule with its microbatches renumbered so that every stage does them in ascending order.

    Data come in order and gradients are added up in order, so results then equal 1F1B's to the bit. Microbatches are
    alike, so nothing else changes: where k passes of a stage have begun, k passes of the one they wait for have ended,
    whichever microbatches those were.
    """
    order = []
    for row in schedule.order:
        forwards: dict[int, int] = {}
        backwards: dict[int, int] = {}
        split: dict[int, deque[int]] = defaultdict(deque)
        renumbered = []
        for stage, kind, _ in row:
            if kind is Kind.W:
                m = split[stage].popleft()
            else:
                done = forwards if kind is Kind.F else backwards
                m = done.get(stage, 0)
                done[stage] = m + 1
                if kind is Kind.I:
                    split[stage].append(m)
            renumbered.append(Pass(stage, kind, m))
        order.append(tuple(renumbered))
    return replace(schedule, order=tuple(order))
