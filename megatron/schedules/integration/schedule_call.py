"""One call of the schedule, as stock's training loop asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class ScheduleCall(NamedTuple):
    """What one call of stock's training loop asks for: the arguments of its schedule functions that passes need.

    Args:
        forward_step_func: the user's forward step, as stock takes it.
        data_iterators: one for each chunk of this rank.
        num_microbatches: n.
        forward_only: whether no backward follows.
        collect_non_loss_data: as stock.
        first_val_step: as stock.
        cp_size: context-parallel ranks, for the scale of the loss.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Iterator[Any] | None]
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    cp_size: int
