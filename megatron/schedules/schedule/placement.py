"""Placements: the rank of each stage, and the limits of the size of a schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted


@dataclass(frozen=True)
class Placement:
    """Map from stages (in model order) to ranks. Every rank has the same number of stages, its chunks.

    Args:
        name: ``sequential``, ``interleaved`` or ``zigzag`` (with two chunks: ``v``).
        rank_of: rank of each stage; its length is ranks x chunks.
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
        """Number of pipeline ranks, d."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """Number of stages, ranks x chunks."""
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank, v."""
        return self.stages // self.ranks

    @property
    def looped(self) -> bool:
        """True if stage s is on rank s mod d, as in stock Megatron."""
        return all(rank == stage % self.ranks for stage, rank in enumerate(self.rank_of))

    @property
    def last_stage(self) -> int:
        """Last stage, which has the output layer and the loss."""
        return self.stages - 1

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages on ``rank`` in model order. The index is the chunk."""
        return self._stages_of[rank]

    @cached_property
    def _chunk_of(self) -> tuple[int, ...]:
        chunk = [0] * self.stages
        for held in self._stages_of:
            for index, stage in enumerate(held):
                chunk[stage] = index
        return tuple(chunk)

    def chunk_of(self, stage: int) -> int:
        """Returns the chunk number of ``stage`` on its rank."""
        return self._chunk_of[stage]

    def __str__(self) -> str:
        return f"{self.name} ({self.ranks} ranks x {counted(self.chunks, 'chunk')})"


def sequential(ranks: int) -> Placement:
    """Placement with one chunk per rank: stage s on rank s."""
    return Placement("sequential", tuple(range(ranks)))


def interleaved(ranks: int, chunks: int) -> Placement:
    """Placement with stage s on rank s mod d: the model loops over the ranks ``chunks`` times in one direction."""
    return Placement("interleaved", tuple(stage % ranks for stage in range(ranks * chunks)))


def zigzag(ranks: int, chunks: int) -> Placement:
    """Placement in which chunks alternate between ascending and descending ranks; with two chunks it is the V shape.

    The two stages at a turn are on the same rank, so no message is sent there. With an even number of chunks the
    embedding and the output layer are both on rank 0.
    """
    up = list(range(ranks))
    down = up[::-1]
    order = [rank for chunk in range(chunks) for rank in (down if chunk % 2 else up)]
    return Placement("v" if chunks == 2 else "zigzag", tuple(order))


def v_shape(ranks: int) -> Placement:
    """V-shaped placement with two chunks per rank: stage s < d on rank s, others on rank 2d - 1 - s.

    Source: arXiv 2405.15362, section 3.
    """
    return zigzag(ranks, 2)


# Larger values are typing errors and would take hours and all memory.
MOST_RANKS = 1024
MOST_PASSES = 1_000_000  # ranks x microbatches x chunks


def check_size(ranks: int, microbatches: int, chunks: int | None, said: str) -> None:
    """Raises an error if a schedule is too large to plan.

    Args:
        ranks, microbatches: size of the schedule.
        chunks: chunks per rank; None if they are not known yet.
        said: flags and values that determine the size, for the error.

    Raises:
        PlanError: if it is too large.
    """
    if ranks > MOST_RANKS or ranks * microbatches * (chunks or 1) > MOST_PASSES:
        raise PlanError(
            f"{said} is too large to plan: there may be {MOST_RANKS} ranks, and ranks x microbatches x chunks may be "
            f"{MOST_PASSES}, at most"
        )
