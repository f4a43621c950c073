"""How many GPUs a dry run supposes that a job would have."""

from __future__ import annotations

import math
import os
from typing import Any

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import whole_variable


def supposes(args: Any) -> bool:
    """Whether this is a dry run, and what this machine has says nothing of where the job will run."""
    return getattr(args, "pipeline_dry_run", None) is not None


def supposed_gpus(args: Any, given: int | None) -> tuple[int, str]:
    """Their number, and where it is from: the flag, torchrun, SLURM, or else a single replica of the model.

    Args:
        args: Megatron's.
        given: by the flag.

    Raises:
        PlanError: where a variable of the launcher cannot be read.
    """
    if given is not None:
        return given, "as given"
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name):
            return whole_variable(name, 1), f"from ${name}"
    return _one_replica(args), f"one replica of the model; {FLAGS['dry_run']} GPUS says another number"


def _one_replica(args: Any) -> int:
    """The fewest GPUs on which every part of the model has its place."""
    cut = args.tensor_model_parallel_size * args.context_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = tensor * args.expert_model_parallel_size if args.num_experts else 1
    return int(args.pipeline_model_parallel_size * math.lcm(cut, experts))
