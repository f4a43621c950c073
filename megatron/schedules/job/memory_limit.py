"""Memory limit of a job as a fraction of 1F1B's activation memory."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.estimate.device_memory import RESERVED, RankMemory, usable
from megatron.schedules.estimate.model_build import MESSAGES, TrainedModel
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.job.job_costs import rank_bytes, unknown_bytes
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.adaptive import least_limit, placements
from megatron.schedules.planner.request import Request, of_1f1b
from megatron.schedules.utils.errors import ShortMemoryError

# Fraction of 1F1B's memory that V-Min uses: the smallest that keeps ranks busy.
_BEGINNING = 1 / 3


def with_memory_limit(spec: JobSpec, limit: MemoryLimit | None, request: Request, messages: int = MESSAGES) -> Request:
    """Sets the memory limit of ``request`` as a fraction of 1F1B's activation memory.

    A limit in bytes covers activations as the dry run counts them. Bytes for messages, for what CUDA graphs of layers
    add to them, and for the temporary memory of Megatron's own recompute are subtracted first.

    Args:
        spec: the job.
        limit: a fraction, a size in bytes, or one that the job measures later; None for no limit.
        request: a request for ``adaptive`` or ``auto``, with its costs.
        messages: largest number of hidden states that a rank stores at the same time beside activations.

    Raises:
        PlanError: the model's sizes are unknown.
        ShortMemoryError: the limit is too small for this model.
    """
    if limit is None:
        return request
    if limit.is_measured:
        return _with_first_limit(request)
    if limit.size is None:
        return replace(request, memory_limit=limit.fraction)
    held, memory = rank_bytes(spec, request.costs), request.costs.in_bytes
    if held is None:
        raise unknown_bytes(spec, f"{spec.flags['memory_limit']} {limit.text}", "a fraction such as 0.5")
    passing = 0.0 if memory is None else memory.most_passing
    set_aside = passing
    if spec.trained is not None:
        set_aside += messages * spec.trained.message_bytes + spec.trained.graph_mask_bytes
    fraction, least = of_1f1b(limit.size - set_aside, request.ranks, held), least_limit(request)
    if fraction < least:
        raise too_small(spec, limit, least * request.ranks * held + set_aside)
    return replace(request, memory_limit=fraction, recompute_room=of_1f1b(passing, request.ranks, held))


def too_small(spec: JobSpec, limit: MemoryLimit, least: float) -> ShortMemoryError:
    """Error for a memory limit where ``least`` bytes of activations and messages are the smallest that works."""
    flag = spec.flags["memory_limit"]
    if limit.lacking:
        return _lacking(spec, limit)
    if spec.settings.memory_limit is None or spec.settings.memory_limit.is_measured:
        flag = f"{spec.flags['schedule']} {spec.settings.schedule.name}: the memory that devices have left,"
    return ShortMemoryError(
        f"{flag} {limit.text} is too small for this model on {spec.sizes.pipeline} ranks: "
        f"{_rounded_up(least / 2**30):g}GiB is the smallest that works"
    )


def _lacking(spec: JobSpec, limit: MemoryLimit) -> ShortMemoryError:
    """Error for a device that is too small for parameters alone."""
    tensor, pipeline = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    helps = f"larger {tensor} or {pipeline} on more GPUs"
    if not spec.sizes.optimizer_instances and spec.sizes.world > spec.sizes.of_replica:
        helps = f"--use-distributed-optimizer, or {helps}"
    return ShortMemoryError(
        f"{spec.flags['schedule']} {spec.settings.schedule.name}: weights, gradients and optimizer state alone do not "
        f"fit: an average rank has {limit.lacking / 2**30:.4g}GiB more of them than {100 * (1 - RESERVED):.0f} % of "
        f"its device; what helps is {helps}"
    )


def device_limit(model: TrainedModel, request: Request, device: float) -> MemoryLimit:
    """Memory of a device left for activations on a rank with average parameters.

    Args:
        model: the model as trained.
        request: its request, whose costs count the memory of parameters above the average.
        device: memory of a device, bytes.
    """
    left = usable(device) - _static_bytes(model, request)
    return MemoryLimit(f"{left / 2**30:.2f}GiB", size=max(left, 1.0), lacking=max(0.0, -left))


def _with_first_limit(request: Request) -> Request:
    """Returns ``request`` with a small memory limit, for a job that has not measured its limit yet.

    The first plan fixes the placement of the stages. The limit is one that allows every placement.
    """
    least = max(least_limit(replace(request, placement=where)) for where in placements(request))
    return replace(request, memory_limit=max(_BEGINNING, least))


def _static_bytes(model: TrainedModel, request: Request) -> float:
    """Bytes of weights, gradients and optimizer on an average rank."""
    average = 0.0
    for where in placements(request):
        counts = request.layers_on(where)
        assert counts is not None, "the model is known"
        sizes = parameters(model.build).by_stage(counts, where.rank_of, request.costs.model.shared_vocabulary)
        held = [RankMemory.static_of(size, model.numbers, 0.0).device for size in sizes]
        average = max(average, sum(held) / len(held))
    return average


def _rounded_up(number: float) -> float:
    """Rounds up to four significant digits, so that the named limit works."""
    scale = 10.0 ** (3 - math.floor(math.log10(number)))
    return math.ceil(scale * number) / scale
