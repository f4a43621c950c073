"""Memory of the devices and of the host that a plan has to keep within."""

from __future__ import annotations

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import whole_variable
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.late_imports import after_megatron


def device_bytes(spec: JobSpec) -> float | None:
    """Memory of a device, bytes, if ``auto`` has to keep within it and the model is known; None otherwise."""
    settings = spec.settings
    if settings.schedule.name != AUTO or settings.memory_limit is not None or spec.trained is None:
        return None
    if settings.dry_run is not None:
        return settings.dry_run.device_bytes
    size: float | None = after_megatron("megatron.schedules.integration.rank_device").device_bytes()
    return size


def check_host(costs: Costs, microbatches: float, ranks: int, *, is_dry: bool) -> float:
    """Host memory for a rank's offloaded activations, bytes.

    Args:
        costs: costs of the plan.
        microbatches: largest number of microbatches that a rank offloads at the same time.
        ranks: pipeline ranks.
        is_dry: whether the job will run on another machine.

    Raises:
        PlanError: the host has too little memory for all its ranks.
    """
    if costs.memory is None or not microbatches:
        return 0.0
    each = microbatches * costs.memory.of_rank(ranks)
    here = whole_variable("LOCAL_WORLD_SIZE", 1)
    free = None if is_dry else available_host_bytes()
    if free is not None and each * here > free:
        raise PlanError(
            f"{FLAGS['offload']} takes {each / 2**30:.1f} GiB of host memory for each of {here} ranks, and this host "
            f"has {free / 2**30:.1f} GiB left: raise {FLAGS['memory_limit']}, or leave the flag out"
        )
    return each
