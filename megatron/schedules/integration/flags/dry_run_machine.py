"""Number of GPUs that a dry run assumes."""

from __future__ import annotations

import os

from megatron.schedules.estimate.parallel_sizes import Sizes
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import whole_variable


def assumed_gpus(sizes: Sizes, given: int | None) -> tuple[int, str]:
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
    return sizes.least_world, f"one replica of the model; {FLAGS['dry_run']} GPUS says another number"
