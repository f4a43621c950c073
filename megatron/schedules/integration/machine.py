"""The machine that a job runs on, or that a dry run assumes."""

from __future__ import annotations

from pathlib import Path

from megatron.schedules.estimate.build_flags import GRAPHS
from megatron.schedules.integration.environment import whole_variable
from megatron.schedules.integration.gpu_libraries import graphs_fault, te_fault, te_missing
from megatron.schedules.integration.late_imports import TooEarlyError, after_megatron
from megatron.schedules.job.job_costs import uses_estimates
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.runtime.free_host_memory import available_host_bytes

# Files of NVIDIA's driver and of AMD's.
_DEVICES = Path("/dev/nvidiactl"), Path("/dev/kfd")


def machine_of(spec: JobSpec) -> Machine:
    """Returns what the plan of a job in training, or in a dry run, has to keep within.

    Raises:
        PlanError: the job measures its memory limit, and its devices cannot be asked for it.
        TooEarlyError: it asks a device or a library, which Megatron's import brings.
    """
    settings = spec.settings
    if settings.dry_run is not None:
        return Machine(settings.dry_run.device_bytes, gpu=settings.dry_run.device)
    if settings.measures_limit:  # checked before a long search
        after_megatron("megatron.schedules.integration.rank_device").can_be_measured()
    needs_engine = spec.stock.transformer_impl == "transformer_engine"
    return Machine(
        _device_bytes(spec),
        available_host_bytes(),
        whole_variable("LOCAL_WORLD_SIZE", 1),
        (te_fault() or "") if needs_engine else "",
        not needs_engine or not te_missing(),
        (graphs_fault() or "") if spec.stock.cuda_graphs == GRAPHS else "",
        _gpu(spec),
        _logs_unequal(),
    )


def _logs_unequal() -> bool:
    """Whether this Megatron has what is mended for ranks without experts; True before it is imported."""
    try:
        after_megatron("megatron.core.transformer.moe.moe_logging")
    except TooEarlyError:
        return True
    except ImportError:
        return False
    return True


def _gpu(spec: JobSpec) -> str:
    """Name of this rank's device; empty without one, and before torch is imported if the plan does not depend on it."""
    try:
        return str(after_megatron("megatron.schedules.integration.rank_device").device_name())
    except TooEarlyError:
        if uses_estimates(spec) and any(node.exists() for node in _DEVICES):
            raise
        return ""


def _device_bytes(spec: JobSpec) -> float | None:
    """Memory of this rank's device, bytes, if the plan depends on it, or a hint about recompute does."""
    keeps_within = spec.settings.schedule.name == AUTO and spec.settings.memory_limit is None
    if not keeps_within and spec.recompute.granularity is None:
        return None
    try:
        size: float | None = after_megatron("megatron.schedules.integration.rank_device").device_bytes()
    except TooEarlyError:
        if keeps_within:
            raise
        return None
    return size
