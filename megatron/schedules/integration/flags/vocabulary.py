"""The size of a vocabulary that all pipeline ranks share: as stock pads it, and a little more where that is needed."""

from __future__ import annotations

import math
from typing import Any


def divisible(words: int, args: Any) -> int:
    """As many words as stock would have, or the fewest more of which all ranks have as many."""
    tensor, ranks = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    multiple = tensor * math.lcm(args.make_vocab_size_divisible_by, ranks)
    return words if words % (tensor * ranks) == 0 else -(-words // multiple) * multiple


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
