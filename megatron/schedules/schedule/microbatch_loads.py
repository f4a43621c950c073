"""Relative loads of an iteration's microbatches if their sequence lengths differ.

Costs refer to one standard microbatch: a single causal sequence of the training sequence length. The time of attention
grows with the square of a sequence's length. All other times and memory grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class MicrobatchLoads:
    """Load of each microbatch, relative to the standard one.

    Args:
        tokens: number of tokens.
        squares: sum of the squared lengths of its sequences.
    """

    tokens: tuple[float, ...]
    squares: tuple[float, ...]

    @staticmethod
    def of(lengths: Sequence[Sequence[int]], standard: int, rows: int = 1) -> MicrobatchLoads:
        """Returns the loads of microbatches from the lengths of their sequences.

        Args:
            lengths: lengths of each microbatch's sequences in tokens, with padding that is computed on.
            standard: tokens of one sequence of the standard microbatch.
            rows: number of sequences of the standard microbatch.

        Raises:
            PlanError: if a microbatch has no tokens.
        """
        if any(sum(each) <= 0 or min(each) < 0 for each in lengths):
            raise PlanError("every microbatch needs sequences of one token or more", "plan_lengths")
        tokens = tuple(sum(each) / (rows * standard) for each in lengths)
        return MicrobatchLoads(
            tokens, tuple(sum(length * length for length in each) / (rows * standard**2) for each in lengths)
        )

    def in_order(self, order: Sequence[int]) -> MicrobatchLoads:
        """Returns the loads with microbatch ``order[k]`` in position k."""
        return MicrobatchLoads(tuple(self.tokens[m] for m in order), tuple(self.squares[m] for m in order))

    @property
    def alike(self) -> bool:
        """True if all microbatches have the same load."""
        return len({*zip(self.tokens, self.squares, strict=True)}) <= 1

    def time(self, standard: float, attention: float, microbatch: int) -> float:
        """Returns the time of a pass on ``microbatch``.

        Args:
            standard: time of the pass on the standard microbatch.
            attention: attention's part of that time.
            microbatch: index of the microbatch.
        """
        return (standard - attention) * self.tokens[microbatch] + attention * self.squares[microbatch]

    def held(self, standard: float, microbatch: int) -> float:
        """Returns the memory for ``microbatch`` if the standard microbatch needs ``standard``."""
        return standard * self.tokens[microbatch]
