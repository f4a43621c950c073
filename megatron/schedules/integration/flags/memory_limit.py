"""The memory limit as a person writes it: a fraction of 1F1B's activation memory, or GiB a rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.model_build import MESSAGES, message_bytes
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import decimal

_GIB = 2**30


def is_in_gib(args: Any) -> bool:
    """Whether the limit is in GiB."""
    return bool(args.pipeline_memory_limit) and args.pipeline_memory_limit.lower().endswith("gib")


def with_memory_limit(args: Any, request: Request, messages: int = MESSAGES) -> Request:
    """``request`` with ``--pipeline-memory-limit`` as a fraction of what 1F1B holds with d microbatches at once.

    GiB are activations as the dry run counts them: what messages and Megatron's own recompute hold beside a plan's
    activations is set aside.

    Args:
        args: Megatron's, validated or not.
        request: for ``adaptive``, its costs and what may be recomputed or offloaded settled.
        messages: how many a rank may hold at once. Where a plan holds more, it is made again with room for them.

    Raises:
        PlanError: where the flag is neither, or too few GiB.
    """
    text, memory = args.pipeline_memory_limit, request.costs.memory
    number, unit = (text[:-3], _GIB) if is_in_gib(args) else (text, 1)
    value = decimal(number)
    if not (math.isfinite(value) and value > 0):
        raise PlanError(f"--pipeline-memory-limit {text!r} is neither a fraction such as 0.5 nor such as 20GiB")
    if unit == 1:
        return replace(request, memory_limit=value)
    if memory is None:
        raise PlanError(f"--pipeline-memory-limit {text} needs the model's sizes: give their flags")
    of_1f1b = request.ranks * memory.of_rank(request.ranks)
    set_aside = messages * message_bytes(args) + memory.most_passing
    limit, least = (value * unit - set_aside) / of_1f1b, least_limit(request)
    if limit < least:
        smallest = _rounded_up((least * of_1f1b + set_aside) / unit)
        raise PlanError(
            f"--pipeline-memory-limit {text} is too small for this model on {request.ranks} ranks: {smallest:g}GiB is "
            "the smallest that works"
        )
    return replace(request, memory_limit=limit)


def _rounded_up(number: float) -> float:
    """To four significant digits, so that what is named works."""
    scale = 10.0 ** (3 - math.floor(math.log10(number)))
    return math.ceil(scale * number) / scale
