"""The memory that this rank's device has left beyond the most that the job has needed."""

from __future__ import annotations

import os

import torch

from megatron.schedules.integration.cpu import standin
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

STANDIN_VARIABLE = "MEGATRON_SCHEDULES_STANDIN_BYTES"
# Of the device: for what comes and goes, and for holes between what is held.
_MARGIN = 0.05


def bytes_left(activations: float) -> float:
    """Bytes beyond the most that was held so far, less a margin; negative where more than that is held.

    Args:
        activations: this rank's peak activation memory by the plan, bytes. Read only where a CPU replaces the device,
            which has $MEGATRON_SCHEDULES_STANDIN_BYTES for them.
    """
    if standin.enabled():
        return (1 - _MARGIN) * standin_bytes() - activations
    free, total = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_reserved()  # freed since
    return float(free + unused - _MARGIN * total)


def device_bytes() -> float | None:
    """The memory of this rank's device, bytes; None where a CPU replaces it."""
    if standin.enabled():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def can_be_measured() -> None:
    """Refuses to measure where there is nothing to measure.

    Raises:
        PlanError: where a CPU replaces the device and the environment does not say what it has.
    """
    if standin.enabled():
        standin_bytes()


def standin_bytes() -> float:
    """Bytes for activations of a CPU that replaces a device.

    Raises:
        PlanError: where the environment does not say it.
    """
    size = whole(os.environ.get(STANDIN_VARIABLE, ""))
    if size is None or size < 0:
        raise PlanError(
            "auto measures what GPUs have left, and this job runs on the CPU: give a fraction of 1F1B's, such as 0.5, "
            "or GiB, such as 20GiB",
            "memory_limit",
        )
    return float(size)
