"""One call of the schedule function by stock's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class ScheduleCall(NamedTuple):
    """The arguments of stock's schedule functions that passes need, of one call.

    Args:
        forward_step_func: the user's forward step, as stock takes it.
        data_iterators: one for each chunk of this rank.
        num_microbatches: n.
        forward_only: whether no backward follows.
        first_val_step: as stock.
        cp_size: context-parallel ranks, for the scale of the loss.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Iterator[Any] | None]
    num_microbatches: int
    forward_only: bool
    first_val_step: bool | None
    cp_size: int
