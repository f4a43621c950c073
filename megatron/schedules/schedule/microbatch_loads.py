"""What each microbatch of an iteration costs, where their sequences differ in length.

Costs are those of one standard microbatch: a single causal sequence of as many tokens as the model is trained with.
Attention grows with the square of a sequence's length; all else, and memory, with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class MicrobatchLoads:
    """Each microbatch against the standard one.

    Args:
        tokens: how many it has.
        squares: the squares of its sequences' lengths, added up.
    """

    tokens: tuple[float, ...]
    squares: tuple[float, ...]

    @staticmethod
    def of(lengths: Sequence[Sequence[int]], standard: int, rows: int = 1) -> MicrobatchLoads:
        """Of microbatches whose sequences have these ``lengths`` in tokens.

        Args:
            lengths: of each microbatch its sequences', padding included where it is computed on.
            standard: tokens of one sequence of the standard microbatch.
            rows: how many of these sequences that has.

        Raises:
            PlanError: where a microbatch has no tokens.
        """
        if any(sum(each) <= 0 or min(each) < 0 for each in lengths):
            raise PlanError("every microbatch needs sequences of one token or more", "plan_lengths")
        tokens = tuple(sum(each) / (rows * standard) for each in lengths)
        return MicrobatchLoads(
            tokens, tuple(sum(length * length for length in each) / (rows * standard**2) for each in lengths)
        )

    def in_order(self, order: Sequence[int]) -> MicrobatchLoads:
        """With microbatch ``order[k]`` in place k."""
        return MicrobatchLoads(tuple(self.tokens[m] for m in order), tuple(self.squares[m] for m in order))

    @property
    def alike(self) -> bool:
        """Whether there is nothing to plan for."""
        return len({*zip(self.tokens, self.squares, strict=True)}) <= 1

    def time(self, standard: float, attention: float, microbatch: int) -> float:
        """Of a pass that takes ``standard`` on the standard microbatch, of which ``attention`` is attention's."""
        return (standard - attention) * self.tokens[microbatch] + attention * self.squares[microbatch]

    def held(self, standard: float, microbatch: int) -> float:
        """What holds ``standard`` of the standard microbatch."""
        return standard * self.tokens[microbatch]
