"""Process numbers in a launcher's environment: the rank of this process, and the number of processes or GPUs."""

from __future__ import annotations

import os

from megatron.schedules.estimate.bounds import within
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

# Source of the number of GPUs if nothing says it.
ONE_REPLICA = "one replica of the model"
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
    values = {name: whole_variable(name, unset) for name, unset in _READ.items()}
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in os.environ and values[rank] >= values[size]:
            raise PlanError(f"${rank} must be less than ${size}, which is {values[size]}, not {values[rank]}")


def is_first() -> bool:
    """Returns whether this process prints for the job: rank 0, or a process without a rank."""
    rank = whole(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    return rank is None or rank <= 0


def assumed_gpus(sizes: ParallelSizes, given: int | None) -> tuple[int, str]:
    """Returns the number of GPUs and its source: the flag, torchrun, SLURM, or one replica of the model.

    Args:
        sizes: parallel sizes. Their number of processes is ignored.
        given: value of the flag.

    Raises:
        PlanError: a variable of the launcher cannot be read.
    """
    if given is not None:
        return given, "as given"
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name):
            return whole_variable(name, 1), f"from ${name}"
    return sizes.least_world, ONE_REPLICA
