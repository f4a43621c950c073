"""Memory limit of a job as a fraction of 1F1B's activation memory."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.model_build import MESSAGES, TrainedModel
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.job.job_costs import rank_bytes, unknown_bytes
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.adaptive import least_limit, placements
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError

# Fraction of a device reserved for the CUDA context, NCCL's buffers, cuBLAS's workspace, and fragmentation.
RESERVED = 0.1
# Fraction of 1F1B's memory that V-Min uses: the smallest that keeps ranks busy.
_BEGINNING = 1 / 3


def with_memory_limit(spec: JobSpec, limit: MemoryLimit | None, request: Request, messages: int = MESSAGES) -> Request:
    """Sets the memory limit of ``request`` as a fraction of 1F1B's activation memory.

    A limit in bytes covers activations as the dry run counts them. Bytes for messages and for the temporary memory of
    Megatron's own recompute are subtracted first.

    Args:
        spec: the job.
        limit: a fraction, a size in bytes, or one that the job measures later; None for no limit.
        request: a request for ``adaptive`` or ``auto``, with its costs.
        messages: largest number of messages that a rank stores at the same time.

    Raises:
        PlanError: the limit is too small for this model, or the model's sizes are unknown.
    """
    if limit is None:
        return request
    if limit.is_measured:
        return _with_first_limit(request)
    if limit.size is None:
        return replace(request, memory_limit=limit.fraction)
    by_user = spec.settings.memory_limit is not None
    flag = spec.flags["memory_limit"]
    named = flag if by_user else f"{spec.flags['schedule']} {AUTO}: the memory that devices have left,"
    held, memory = rank_bytes(spec, request.costs), request.costs.in_bytes
    if held is None:
        raise unknown_bytes(spec, f"{named} {limit.text}", "a fraction such as 0.5")
    of_1f1b = request.ranks * held
    passing = 0.0 if memory is None else memory.most_passing
    set_aside = passing + (0.0 if spec.trained is None else messages * spec.trained.message_bytes)
    fraction, least = (limit.size - set_aside) / of_1f1b, least_limit(request)
    if fraction < least:
        smallest = _rounded_up((least * of_1f1b + set_aside) / 2**30)
        raise PlanError(
            f"{named} {limit.text} is too small for this model on {request.ranks} ranks: {smallest:g}GiB is the "
            "smallest that works"
        )
    return replace(request, memory_limit=fraction, recompute_room=passing / of_1f1b)


def device_limit(model: TrainedModel, request: Request, device: float) -> MemoryLimit:
    """Memory of a device left for activations on a rank with average parameters.

    Args:
        model: the model as trained.
        request: its request, whose costs count the memory of parameters above the average.
        device: memory of a device, bytes.
    """
    left = (1 - RESERVED) * device - _static_bytes(model, request)
    return MemoryLimit(f"{left / 2**30:.2f}GiB", size=max(left, 1.0))


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
