"""A schedule: the order of the passes on every rank, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.schedules.planning.passes import Pass
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
