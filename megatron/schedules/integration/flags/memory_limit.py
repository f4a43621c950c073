"""The memory limit of a job as a fraction of 1F1B's activation memory."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError

# Most plans hold fewer messages on a rank at once. A plan's own number is known only once it is made; where it is
# larger, the plan is made again with room for them.
MESSAGES = 8


def with_memory_limit(spec: JobSpec, limit: MemoryLimit, request: Request, messages: int = MESSAGES) -> Request:
    """``request`` with ``limit`` as a fraction of what 1F1B holds with d microbatches at once.

    GiB are activations as the dry run counts them: what messages and Megatron's own recompute hold beside a plan's
    activations is set aside.

    Args:
        spec: the job.
        limit: a fraction or bytes.
        request: for ``adaptive``, its costs and what may be recomputed or offloaded settled.
        messages: how many a rank may hold at once.

    Raises:
        PlanError: for too few bytes.
    """
    flag, memory = FLAGS["memory_limit"], request.costs.memory
    if limit.size is None:
        return replace(request, memory_limit=limit.fraction)
    if memory is None:
        raise PlanError(f"{flag} {limit.text} needs the model's sizes: give their flags")
    of_1f1b = request.ranks * memory.of_rank(request.ranks)
    set_aside = messages * spec.message_bytes + memory.most_passing
    fraction, least = (limit.size - set_aside) / of_1f1b, least_limit(request)
    if fraction < least:
        smallest = _rounded_up((least * of_1f1b + set_aside) / 2**30)
        raise PlanError(
            f"{flag} {limit.text} is too small for this model on {request.ranks} ranks: {smallest:g}GiB is the "
            "smallest that works"
        )
    return replace(request, memory_limit=fraction)


def _rounded_up(number: float) -> float:
    """To four significant digits, so that what is named works."""
    scale = 10.0 ** (3 - math.floor(math.log10(number)))
    return math.ceil(scale * number) / scale
