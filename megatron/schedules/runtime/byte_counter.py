"""Counts by how many bytes more a rank holds after each of its passes."""

from __future__ import annotations

from collections.abc import Callable

from megatron.schedules.runtime.program import Action
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.passes import Pass


class ByteCounter:
    """An engine's observer (see :class:`.engine.Observer`) that looks at the bytes held before and after each pass.

    Args:
        held: says how many there are now, by the host's books: an allocator's, or a meter's. Nothing is waited for.

    Attributes:
        changes: each pass of the run, in order, and by how many bytes more was held when it ended.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        self._held, self._before = held, 0
        self.changes: list[tuple[Pass, float]] = []

    def began(self, action: Action) -> None:
        """See :class:`.engine.Observer`."""
        self._before = self._held()

    def arrived(self) -> None:
        """See :class:`.engine.Observer`: what arrives was held before."""

    def ended(self, action: Action) -> None:
        """See :class:`.engine.Observer`."""
        op, stage, microbatch, _ = action
        if isinstance(op, Kind):
            self.changes.append((Pass(stage, op, microbatch), float(self._held() - self._before)))
