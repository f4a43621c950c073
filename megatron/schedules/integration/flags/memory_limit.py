"""The memory limit as a person writes it: a fraction of 1F1B's activation memory, or GiB a rank."""

from __future__ import annotations

import copy
import math
from typing import Any

from megatron.schedules.integration.flags.later import after_megatron
from megatron.schedules.planning.errors import PlanError

_GIB = 2**30


def memory_limit(args: Any) -> float:
    """``--pipeline-memory-limit`` as a fraction of what 1F1B holds with d microbatches at once.

    GiB are turned into one by stock's own estimate of 1F1B's activations (arXiv 2205.05198), for half precision; it
    knows neither fused attention nor every kind of layer.

    Raises:
        PlanError: where it is neither.
    """
    text = args.pipeline_memory_limit
    number, unit = (text[:-3], _GIB) if text.lower().endswith("gib") else (text, 1)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise PlanError(f"--pipeline-memory-limit {text!r} is neither a fraction such as 0.5 nor such as 20GiB")
    return value if unit == 1 else value * unit / bytes_of_1f1b(args)


def bytes_of_1f1b(args: Any) -> float:
    """Stock's estimate of the activations that the first rank holds under 1F1B, from flags not yet validated."""
    estimate, known = after_megatron("megatron.training.theoretical_memory_usage"), copy.copy(args)
    known.virtual_pipeline_model_parallel_size = None
    known.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    known.padded_vocab_size = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    lean = args.sequence_parallel and args.recompute_granularity == "selective"
    of = estimate.compute_activation_memory if lean else estimate.compute_activation_memory_without_sp
    half = args.bf16 or args.fp16
    return float(of(known, num_microbatches=None)) * (1 if half else 2)
