"""The model that Megatron's arguments describe, as far as its arithmetic goes."""

from __future__ import annotations

import copy
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.build import Shape
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.utils.errors import PlanError

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def shape_of(args: Any) -> Shape | None:
    """The shape of the model in ``args``, validated or not; None where the flags leave its sizes to a checkpoint.

    Raises:
        TooEarlyError: where the vocabulary is that of a tokenizer, which Megatron builds.
    """
    if any((getattr(args, size) or 0) < 1 for size in _SIZES):
        return None
    try:
        return megatron_flags.shape(args, _vocabulary(args))
    except (ValueError, ZeroDivisionError) as error:
        raise PlanError(str(error)) from None


def _vocabulary(args: Any) -> int:
    """Words as padded; 0 where only a tokenizer that cannot be built knows how many there are."""
    if known := getattr(args, "padded_vocab_size", None):
        return int(known)
    return megatron_flags.padded(args.vocab_size or _words_of_tokenizer(args), args)


def _words_of_tokenizer(args: Any) -> int:
    building = after_megatron("megatron.core.tokenizers.utils.build_tokenizer")
    own = copy.copy(args)  # stock notes the vocabulary in what it is given
    own.rank = -1  # nor is it this one that says so
    try:
        return int(building.build_tokenizer(own).vocab_size)
    except Exception:  # whatever is wrong with it, stock says better, in a moment
        return 0
