"""Counts by how many bytes a rank's memory changes in each of its passes."""

from __future__ import annotations

from collections.abc import Callable

from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.program import Action
from megatron.schedules.schedule.kinds import Kind, Pass


class ByteCounter(Observer):
    """Compares the bytes in use before and after each pass.

    Args:
        held: returns the bytes in use now, as the host knows them: from an allocator or a meter. Must not wait.

    Attributes:
        changes: each pass of the run, in order, and the bytes in use after it less those before it.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        self._held, self._before = held, 0
        self.changes: list[tuple[Pass, float]] = []

    def began(self, action: Action) -> None:
        self._before = self._held()

    def ended(self, action: Action) -> None:
        op, stage, microbatch, _ = action
        if isinstance(op, Kind):
            self.changes.append((Pass(stage, op, microbatch), float(self._held() - self._before)))
