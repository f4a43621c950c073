"""One call of the schedule function by stock's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class ScheduleCall(NamedTuple):
    """Arguments of one call of stock's schedule functions that passes need.

    Args:
        forward_step_func: the user's forward step, as stock expects it.
        data_iterators: one iterator for each chunk of this rank.
        num_microbatches: n.
        forward_only: whether no backward follows.
        first_val_step: as in stock.
        cp_size: number of context-parallel ranks, for scaling the loss.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Iterator[Any] | None]
    num_microbatches: int
    forward_only: bool
    first_val_step: bool | None
    cp_size: int
