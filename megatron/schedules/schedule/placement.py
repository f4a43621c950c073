"""Placements: which rank holds which stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted


@dataclass(frozen=True)
class Placement:
    """A map from stage (in model order) to rank; every rank holds equally many stages, its chunks.

    Args:
        name: ``sequential``, ``interleaved`` or ``zigzag`` (with two chunks: ``v``).
        rank_of: the rank of each stage; its length is ranks x chunks.
    """

    name: str
    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        held = Counter(self.rank_of)
        whole = all(isinstance(rank, int) for rank in held)
        if not held or not whole or set(held) != set(range(len(held))) or len(set(held.values())) != 1:
            raise PlanError(
                f"ranks must be numbered from 0 and hold equally many stages each; the stages are on {self.rank_of}"
            )

    @cached_property
    def ranks(self) -> int:
        """d, the number of pipeline ranks."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """The number of stages, ranks x chunks."""
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        """v, the number of stages on each rank."""
        return self.stages // self.ranks

    @property
    def looped(self) -> bool:
        """Whether stage s is on rank s mod d, as everywhere in stock Megatron: the model loops over the ranks."""
        return all(rank == stage % self.ranks for stage, rank in enumerate(self.rank_of))

    @property
    def last_stage(self) -> int:
        """The stage that holds the output layer and the loss."""
        return self.stages - 1

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank`` in model order; the index is the chunk."""
        return self._stages_of[rank]

    @cached_property
    def _chunk_of(self) -> tuple[int, ...]:
        chunk = [0] * self.stages
        for held in self._stages_of:
            for index, stage in enumerate(held):
                chunk[stage] = index
        return tuple(chunk)

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's chunks ``stage`` is."""
        return self._chunk_of[stage]

    def __str__(self) -> str:
        return f"{self.name} ({self.ranks} ranks x {counted(self.chunks, 'chunk')})"


def sequential(ranks: int) -> Placement:
    """One chunk a rank: stage s on rank s."""
    return Placement("sequential", tuple(range(ranks)))


def interleaved(ranks: int, chunks: int) -> Placement:
    """Stage s on rank s mod d: the model loops over the ranks ``chunks`` times, always in the same direction."""
    return Placement("interleaved", tuple(stage % ranks for stage in range(ranks * chunks)))


def zigzag(ranks: int, chunks: int) -> Placement:
    """The model goes up the ranks and down again, turning on the spot at each end; two chunks make the V.

    The two stages at a turn share a rank, so nothing is sent there. With an even number of chunks the embedding and
    the output layer share rank 0.
    """
    up = list(range(ranks))
    down = up[::-1]
    order = [rank for chunk in range(chunks) for rank in (down if chunk % 2 else up)]
    return Placement("v" if chunks == 2 else "zigzag", tuple(order))


def v_shape(ranks: int) -> Placement:
    """Two chunks a rank: stage s < d on rank s, stage s >= d on rank 2d - 1 - s (arXiv 2405.15362, section 3)."""
    return zigzag(ranks, 2)
