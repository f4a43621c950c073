"""What a dry run supposes of the machine that a job would have: how many GPUs, and how large they are."""

from __future__ import annotations

import math
import os
from typing import Any

from megatron.schedules.estimate.bounds import BOUNDS
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import whole_variable
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import integer, size


def supposes(args: Any) -> bool:
    """Whether this is a dry run, and what this machine has says nothing of where the job will run."""
    return getattr(args, "pipeline_dry_run", None) is not None


def supposed_gpus(args: Any) -> tuple[int, str]:
    """Their number, and where it is from: the flag, torchrun, SLURM, or else a single replica of the model.

    Args:
        args: with ``pipeline_dry_run``, the flag's text, empty where it names no number.

    Raises:
        PlanError: where the number is none.
    """
    flag = FLAGS["dry_run"]
    _, most = BOUNDS[flag]
    given = integer(flag, args.pipeline_dry_run or None, 1, "the number of GPUs that the job would have", most)
    if given is not None:
        return given, "as given"
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name):
            return whole_variable(name, 1), f"from ${name}"
    return _one_replica(args), f"one replica of the model; {flag} GPUS says another number"


def device_memory(args: Any) -> float | None:
    """Bytes of ``--device-memory``; None without it.

    Raises:
        PlanError: where it cannot be read, or there is no dry run to compare it.
    """
    flag, text = FLAGS["device_memory"], getattr(args, "device_memory", None)
    if text is None:
        return None
    if not supposes(args):
        raise PlanError(f"{flag} goes with {FLAGS['dry_run']}, which is missing")
    return size(flag, text)


def _one_replica(args: Any) -> int:
    """The fewest GPUs on which every part of the model has its place."""
    cut = args.tensor_model_parallel_size * args.context_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = tensor * args.expert_model_parallel_size if args.num_experts else 1
    return int(args.pipeline_model_parallel_size * math.lcm(cut, experts))
