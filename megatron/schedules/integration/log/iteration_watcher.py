"""What looks on while training iterations run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.program import Program
from megatron.schedules.schedule.simulator import Timeline


class CallWatcher(Protocol):
    """Told of each training call of the schedule function; evaluations are none of its business."""

    def begin(self, program: Program, planned: Timeline | None) -> Sequence[Observer]:
        """A call is about to run ``program``; whoever is to hear of its actions.

        Args:
            program: of this rank.
            planned: how, where this iteration has a plan of its own.
        """
        ...

    def end(self) -> None:
        """It has run well, as far as the host can tell."""
        ...
