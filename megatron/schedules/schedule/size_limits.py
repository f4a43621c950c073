"""How large a schedule may be: one place for the command line, for training and for the tools."""

from __future__ import annotations

from megatron.schedules.utils.errors import PlanError

# More is a slip of the finger, and would take hours and all the memory there is.
MOST_RANKS = 1024
MOST_PASSES = 1_000_000  # ranks x microbatches x chunks


def check_size(ranks: int, microbatches: int, chunks: int | None, said: str) -> None:
    """Refuse a schedule that is too large to plan.

    Args:
        ranks, microbatches: the schedule's.
        chunks: of each rank; None where the schedule leaves it open.
        said: the flags and values that make up the size.

    Raises:
        PlanError: where it is too large.
    """
    if ranks > MOST_RANKS or ranks * microbatches * (chunks or 1) > MOST_PASSES:
        raise PlanError(
            f"{said} is too large to plan: there may be {MOST_RANKS} ranks, and ranks x microbatches x chunks may be "
            f"{MOST_PASSES}, at most"
        )
