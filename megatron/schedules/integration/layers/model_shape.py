"""The shape of the model that Megatron's arguments describe."""

from __future__ import annotations

import copy
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.layer_pattern import hybrid_pattern
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.utils.errors import PlanError

_SIZES = ("hidden_size", "num_attention_heads", "seq_length")


def shape_of(args: Any) -> Shape | None:
    """Returns the shape of the model in ``args``, validated or not.

    None where its sizes come from a checkpoint.

    Raises:
        TooEarlyError: the vocabulary is that of a tokenizer, which Megatron builds.
    """
    known = hybrid_pattern(args) is not None or (args.num_layers or 0) > 0
    if not known or any((getattr(args, size) or 0) < 1 for size in _SIZES):
        return None
    try:
        return megatron_flags.shape(args, _vocabulary(args))
    except (ValueError, ZeroDivisionError) as error:
        raise PlanError(str(error)) from None


def _vocabulary(args: Any) -> int:
    """Returns the padded size of the vocabulary; 0 where only a tokenizer that cannot be built knows it."""
    if known := getattr(args, "padded_vocab_size", None):
        return int(known)
    return megatron_flags.padded(args.vocab_size or _size_of_tokenizer(args), args)


def _size_of_tokenizer(args: Any) -> int:
    building = after_megatron("megatron.core.tokenizers.utils.build_tokenizer")
    own = copy.copy(args)  # stock writes the size to its arguments
    own.rank = -1  # no rank prints it
    try:
        return int(building.build_tokenizer(own).vocab_size)
    except Exception:  # stock reports whatever is wrong with it, in a moment
        return 0
