"""Process numbers in a launcher's environment: the rank of this process and the number of processes."""

from __future__ import annotations

import os

from megatron.schedules.estimate.bounds import within
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

# Variables that Megatron and torch read as numbers, with their defaults.
_READ = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}


def whole_variable(name: str, unset: int) -> int:
    """Value of the environment variable ``name``, or ``unset`` if it is not set.

    Raises:
        PlanError: the value is not a number in the valid range.
    """
    text = os.environ.get(name)
    if text is None:
        return unset
    value = whole(text)
    if value is None:
        raise PlanError(f"${name} must be a whole number, not {text!r}: set it as your launcher would, or unset it")
    return within(f"${name}", value)


def check_environment() -> None:
    """Checks that the launcher's variables are valid.

    Raises:
        PlanError: a variable is wrong; the error names it.
    """
    found = {name: whole_variable(name, unset) for name, unset in _READ.items()}
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in os.environ and found[rank] >= found[size]:
            raise PlanError(f"${rank} must be less than ${size}, which is {found[size]}, not {found[rank]}")


def is_first() -> bool:
    """Returns whether this process prints for the job: rank 0, or a process without a rank."""
    rank = whole(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    return rank is None or rank <= 0
