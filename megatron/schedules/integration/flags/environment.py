"""What a launcher's environment says: the number of a process, and how many there are."""

from __future__ import annotations

import os

from megatron.schedules.estimate.bounds import within
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

# Those that Megatron and torch read as numbers, with their values where they are unset.
_READ = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}


def whole_variable(name: str, unset: int) -> int:
    """Value of the environment variable ``name``, ``unset`` where it is not set.

    Raises:
        PlanError: where it holds something else, or more than is possible.
    """
    text = os.environ.get(name)
    if text is None:
        return unset
    value = whole(text)
    if value is None:
        raise PlanError(f"${name} must be a whole number, not {text!r}: set it as your launcher would, or unset it")
    return within(f"${name}", value)


def check_environment() -> None:
    """Refuses an environment that names no process.

    Raises:
        PlanError: naming the variable.
    """
    found = {name: whole_variable(name, unset) for name, unset in _READ.items()}
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in os.environ and found[rank] >= found[size]:
            raise PlanError(f"${rank} must be less than ${size}, which is {found[size]}, not {found[rank]}")


def is_first() -> bool:
    """Whether this process prints for the job; a process without a number does."""
    rank = whole(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    return rank is None or rank <= 0
