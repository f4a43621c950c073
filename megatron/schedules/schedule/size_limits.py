"""Limits on the size of a schedule, for the command line, training and the tools."""

from __future__ import annotations

from megatron.schedules.utils.errors import PlanError

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
