"""What programs send, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron.schedules.programs.program import SENDS, Channel, Program


def messages(programs: Iterable[Program]) -> Counter[Channel]:
    """How many messages each channel carries."""
    return Counter(
        Channel(program.rank, action.peer)
        for program in programs
        for action in program.actions
        if action.op in SENDS and action.peer is not None
    )
