"""Device memory of this rank: the peak of a call of the schedule, and what is left beyond the peak of the job.

On a GPU the allocator says it. Without one, tensors are counted, and the environment says how much memory there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.schedules.estimate.device_memory import usable
from megatron.schedules.integration.cpu import standin
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

STANDIN_VARIABLE = "MEGATRON_SCHEDULES_STANDIN_BYTES"


def device_name() -> str:
    """Name of this rank's GPU; empty without one."""
    if standin.enabled() or not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name(torch.cuda.current_device())


class PeakReport:
    """Measures and prints the peak memory of training calls, beyond the memory in use when a call begins.

    This includes activations and messages, and on a GPU also temporary memory of passes.

    Args:
        group: process group of the pipeline.
        next_call: whether to measure the next call.
        say: prints a line on the last rank.

    Attributes:
        bytes: this rank's peak in the last measured call, bytes; 0 before.
    """

    def __init__(self, group: dist.ProcessGroup, *, next_call: bool, say: Callable[[str], None]) -> None:
        self.bytes, self._say = 0, say
        self._group, self._next, self._counted = group, next_call, False
        self._meter: ActivationMeter | None = None
        self._before = 0

    def measure_next_call(self) -> None:
        """Measures the next call."""
        self._next = True

    def count_next_call(self) -> None:
        """Counts tensors in the next call, on a GPU too. This is slower and excludes temporary memory of passes."""
        self._next = self._counted = True

    def begin(self, chunks: Sequence[torch.nn.Module]) -> ActivationMeter | None:
        """Begins a call; returns the meter that counts its tensors, or None."""
        self._meter = None
        if not self._next:
            return None
        if self._counted or standin.enabled():
            self._meter = ActivationMeter(parameter for chunk in chunks for parameter in chunk.parameters())
        else:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self._meter

    def end(self) -> None:
        """Ends the call. Collective if the call was measured."""
        if not self._next:
            return
        self._next = False
        self.bytes = torch.cuda.max_memory_allocated() - self._before if self._meter is None else self._meter.peak
        peaks = of_all_ranks(self.bytes, self._group)
        by_rank = ", ".join(f"rank {rank} {peak / 2**20:.2f} MiB" for rank, peak in enumerate(peaks))
        self._say(f"pipeline schedule: peak activation memory measured: {by_rank}; worst {max(peaks)} bytes")


class PeakWatch:
    """Watches the GPU allocator's maximum during calls. It does not reset the maximum, because stock reports it too.

    The maximum grows at least in the first iterations, so their peak is known. Later calls are seen only if they use
    more memory.

    Attributes:
        bytes: peak memory beyond the memory in use at the start of the call; None until the maximum has grown.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._counts = not standin.enabled()
        self._allocated = self._most = 0

    def begin(self) -> None:
        """Begins a call."""
        if self._counts:
            self._allocated, self._most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    def end(self) -> None:
        """Ends a call, after the host has queued all its work."""
        if self._counts and (most := torch.cuda.max_memory_allocated()) != self._most:
            self.bytes = most - self._allocated


def bytes_left(activations: float) -> float:
    """Free bytes beyond the peak memory so far, less a margin; negative if memory is already short.

    Args:
        activations: planned peak activation memory of this rank, bytes. Read only if the CPU replaces the device; the
            memory for activations is then $MEGATRON_SCHEDULES_STANDIN_BYTES.
    """
    if standin.enabled():
        return usable(standin_bytes()) - activations
    free, total = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_reserved()  # reserved once, freed since
    return float(free + unused - (total - usable(total)))


def device_bytes() -> float | None:
    """Memory of this rank's device, bytes; None if there is none, or the CPU replaces it."""
    if standin.enabled() or not torch.cuda.is_available():
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
