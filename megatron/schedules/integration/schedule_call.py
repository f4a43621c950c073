"""One call of the schedule function by stock's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist


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


def check_groups(own: dist.ProcessGroup, communicator: Any, groups: Any) -> None:
    """Checks that a call means the pipeline that the schedule was planned for.

    Pipelines of several modules, as for models with an encoder of their own, bring the messages and the groups of each
    module along.

    Args:
        own: this rank's pipeline group.
        communicator, groups: stock's arguments ``p2p_communicator`` and ``pg_collection``; None for the usual ones.

    Raises:
        ValueError: they belong to another pipeline.
    """
    for given, name in ((communicator, "pp_group"), (groups, "pp")):
        group = own if given is None else getattr(given, name, None)
        if group is own or (group is None and hasattr(given, "tp")):  # not all collections name the pipeline
            continue
        if group is None or dist.get_process_group_ranks(group) != dist.get_process_group_ranks(own):
            raise ValueError(
                f"the schedule was called with a {type(given).__name__} of another pipeline than Megatron's own: "
                "pipelines of several modules need Megatron's own schedule"
            )
