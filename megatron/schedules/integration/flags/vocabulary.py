"""The size of a vocabulary that all pipeline ranks share: as stock pads it, and a little more where that is needed."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate.megatron_flags import divisible


def indivisible(args: Any) -> str:
    """What is wrong with a padded vocabulary that was given, by a checkpoint perhaps; empty where it can be cut."""
    words = getattr(args, "padded_vocab_size", None)
    if words is None or divisible(words, args) == words:
        return ""
    across = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return (
        f"has {words} words as padded, which do not divide by tensor x pipeline parallel = {across}: give --vocab-size "
        "or a tokenizer, and leave out what says the padded size"
    )
