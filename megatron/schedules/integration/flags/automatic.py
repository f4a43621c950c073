"""Choices of ``--pipeline-schedule auto``: layer partition and recompute, within the memory of the devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.model_build import TrainedModel
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemoryLimit, MemorySaving
from megatron.schedules.planner.adaptive import placements
from megatron.schedules.planner.registry import AUTO, Request

# Fraction of a device reserved for the CUDA context, NCCL's buffers, cuBLAS's workspace, and fragmentation.
RESERVED = 0.1


def choices(spec: JobSpec) -> Iterator[JobSpec]:
    """Yields the job with all choices that ``auto`` may make, then with fewer, and last as its flags say. All differ.

    Recompute and other layer partitions leave results bitwise equal.
    """
    settings, stock = spec.settings, spec.layers
    known = spec.model is not None
    placed = saving = settings
    if known and settings.layers is None and not (stock.by_hand or any(stock.stand_in)):
        placed = saving = replace(settings, layers="auto")
    if known and settings.saving == MemorySaving() and spec.recompute.granularity != "full":
        saving = replace(placed, saving=MemorySaving(recompute=True))
    return (replace(spec, settings=each) for each in dict.fromkeys((saving, placed, settings)))


def device_bytes(spec: JobSpec) -> float | None:
    """Memory of a device, bytes, if ``auto`` has to keep within it and the model is known; None otherwise."""
    settings = spec.settings
    if settings.schedule.name != AUTO or settings.memory_limit is not None or spec.trained is None:
        return None
    if settings.dry_run is not None:
        return settings.dry_run.device_bytes
    size: float | None = after_megatron("megatron.schedules.integration.rank_device").device_bytes()
    return size


def device_limit(model: TrainedModel, request: Request, device: float) -> MemoryLimit:
    """Memory of a device left for activations on a rank with average parameters.

    Args:
        model: the model as trained.
        request: its request, whose costs reserve the memory of parameters above the average.
        device: memory of a device, bytes.
    """
    average, most = _static_bytes(model, request)
    left = (1 - RESERVED) * device - average
    return MemoryLimit(f"{left / 2**30:.2f}GiB", size=max(left, 1.0), reserved=most - average)


def _static_bytes(model: TrainedModel, request: Request) -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer: on an average rank, and the most on a rank of any placement."""
    average = most = 0.0
    for where in placements(request):
        counts = request.layers_on(where)
        assert counts is not None, "the model is known"
        sizes = parameters(model.build).by_stage(counts, where.rank_of, request.costs.shared_vocabulary)
        held = [RankMemory.static_of(size, model.numbers, 0.0).device for size in sizes]
        average, most = max(average, sum(held) / len(held)), max(most, *held)
    return average, most
