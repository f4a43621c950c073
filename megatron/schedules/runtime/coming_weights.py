"""The weight gradients that a rank may compute ahead of their W, behind messages of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

from megatron.schedules.runtime.program import Action, Program
from megatron.schedules.schedule.kinds import Kind


class ComingWeights:
    """The W of one rank that come next and are due, while its program runs.

    Args:
        program: program of the rank; a new run needs a new object.
    """

    def __init__(self, program: Program) -> None:
        self._endings = program.endings
        # The coming passes that add to the gradients of linears, and which W have had their I.
        self._adding = deque(action for action in program.actions if action.op in (Kind.B, Kind.W))
        self._due: set[tuple[int, int]] = set()

    def ended(self, kind: Kind, stage: int, microbatch: int) -> None:
        """An I, W or B has ended."""
        if kind is Kind.I:
            self._due.add((stage, microbatch))
        elif self._adding and self._adding[0][:3] == (kind, stage, microbatch):  # a tool may repeat a pass
            self._adding.popleft()

    def due(self) -> Iterator[tuple[int, int]]:
        """Yields (stage, microbatch) of the W that may run now, in order.

        The last W of a chunk stays whole: data-parallel reductions begin with it, on all replicas alike.
        """
        for action in takewhile(self._may_run, self._adding):
            yield action.stage, action.microbatch

    def _may_run(self, action: Action) -> bool:
        op, stage, microbatch, _ = action
        due = op is Kind.W and (stage, microbatch) in self._due
        return due and (op, stage, microbatch) not in self._endings
