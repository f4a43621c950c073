"""Free device memory of this rank beyond the peak memory of the job."""

from __future__ import annotations

import os

import torch

from megatron.schedules.integration.cpu import standin
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

STANDIN_VARIABLE = "MEGATRON_SCHEDULES_STANDIN_BYTES"
# Fraction of the device for temporary tensors and fragmentation.
_MARGIN = 0.05


def bytes_left(activations: float) -> float:
    """Free bytes beyond the peak memory so far, less a margin; negative if memory is already short.

    Args:
        activations: planned peak activation memory of this rank, bytes. Read only if the CPU replaces the device; the
            memory for activations is then $MEGATRON_SCHEDULES_STANDIN_BYTES.
    """
    if standin.enabled():
        return (1 - _MARGIN) * standin_bytes() - activations
    free, total = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_reserved()  # reserved once, freed since
    return float(free + unused - _MARGIN * total)


def device_bytes() -> float | None:
    """Memory of this rank's device, bytes; None if the CPU replaces it."""
    if standin.enabled():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def can_be_measured() -> None:
    """Checks that free memory can be measured.

    Raises:
        PlanError: the CPU replaces the device and the environment does not set its memory.
    """
    if standin.enabled():
        standin_bytes()


def standin_bytes() -> float:
    """Memory for activations on a CPU that replaces a device, bytes.

    Raises:
        PlanError: the environment does not set it.
    """
    size = whole(os.environ.get(STANDIN_VARIABLE, ""))
    if size is None or size < 0:
        raise PlanError(
            "auto measures what GPUs have left, and this job runs on the CPU: give a fraction of 1F1B's, such as 0.5, "
            "or GiB, such as 20GiB",
            "memory_limit",
        )
    return float(size)
