"""Memory limit of a job as a fraction of 1F1B's activation memory."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.schedules.estimate.model_build import MESSAGES
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError


def with_memory_limit(
    flag: str, limit: MemoryLimit, request: Request, message_bytes: float, messages: int = MESSAGES
) -> Request:
    """Sets the memory limit of ``request`` as a fraction of 1F1B's activation memory.

    A limit in bytes covers activations as the dry run counts them. Bytes for messages and for the temporary memory of
    Megatron's own recompute are subtracted first.

    Args:
        flag: name of the flag, for errors.
        limit: a fraction or a size in bytes.
        request: a request for ``adaptive``, with its costs.
        message_bytes: hidden states of one microbatch on one rank, bytes.
        messages: largest number of messages that a rank stores at the same time.

    Raises:
        PlanError: the limit is too small for this model.
    """
    memory = request.costs.memory
    if limit.size is None:
        return replace(request, memory_limit=limit.fraction)
    if memory is None:
        raise PlanError(f"{flag} {limit.text} needs the model's sizes: give their flags")
    of_1f1b = request.ranks * memory.of_rank(request.ranks)
    set_aside = messages * message_bytes + memory.most_passing
    fraction, least = (limit.size - set_aside) / of_1f1b, least_limit(request) + limit.reserved / of_1f1b
    if fraction < least:
        smallest = _rounded_up((least * of_1f1b + set_aside) / 2**30)
        raise PlanError(
            f"{flag} {limit.text} is too small for this model on {request.ranks} ranks: {smallest:g}GiB is the "
            "smallest that works"
        )
    return replace(request, memory_limit=fraction, recompute_room=memory.most_passing / of_1f1b)


def _rounded_up(number: float) -> float:
    """Rounds up to four significant digits, so that the named limit works."""
    scale = 10.0 ** (3 - math.floor(math.log10(number)))
    return math.ceil(scale * number) / scale
