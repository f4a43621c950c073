"""The memory limit as a person writes it: a fraction of 1F1B's activation memory, or GiB a rank."""

from __future__ import annotations

import copy
import math
from typing import Any

from megatron.schedules.integration.flags.later import after_megatron
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.given import decimal

_GIB = 2**30
# Of a rank's messages, received ahead or not known to be sent, no plan that we have seen holds more at once. They are
# small beside activations, and a plan's own number is known only once it is made.
_MESSAGES = 8


def memory_limit(args: Any) -> float:
    """``--pipeline-memory-limit`` as a fraction of what 1F1B holds with d microbatches at once.

    GiB are turned into one by stock's own estimate of 1F1B's activations (arXiv 2205.05198), for half precision; it
    knows neither fused attention nor every kind of layer. Room for messages is set aside.

    Raises:
        PlanError: where it is neither.
    """
    text = args.pipeline_memory_limit
    number, unit = (text[:-3], _GIB) if text.lower().endswith("gib") else (text, 1)
    value = decimal(number)
    if not (math.isfinite(value) and value > 0):
        raise PlanError(f"--pipeline-memory-limit {text!r} is neither a fraction such as 0.5 nor such as 20GiB")
    if unit == 1:
        return value
    left = value * unit - _MESSAGES * message_bytes(args)
    if left <= 0:
        raise PlanError(f"--pipeline-memory-limit {text} is less than what messages between ranks take")
    return left / bytes_of_1f1b(args)


def message_bytes(args: Any) -> float:
    """One microbatch's hidden states on one rank."""
    ranks = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return float(args.seq_length * args.micro_batch_size * args.hidden_size / ranks * number_bytes(args))


def number_bytes(args: Any) -> int:
    """Of a number that is at half precision where any is."""
    return 2 if _half(args) else 4


def _half(args: Any) -> bool:
    return bool(args.bf16 or args.fp16)


def bytes_of_1f1b(args: Any) -> float:
    """Stock's estimate of the activations that the first rank holds under 1F1B, from flags not yet validated."""
    estimate, known = after_megatron("megatron.training.theoretical_memory_usage"), copy.copy(args)
    known.virtual_pipeline_model_parallel_size = None
    known.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    known.padded_vocab_size = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    lean = args.sequence_parallel and args.recompute_granularity == "selective"
    of = estimate.compute_activation_memory if lean else estimate.compute_activation_memory_without_sp
    return float(of(known, num_microbatches=None)) * (1 if _half(args) else 2)
