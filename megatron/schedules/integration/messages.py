"""Messages between pipeline ranks. Their process groups are made once, with stock's settings for its own groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.schedules.integration.flags.arguments import GroupFlags
from megatron.schedules.programs.program import channels_of
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.transport import (
    Channels,
    MessageSpec,
    Transport,
    make_channels,
    make_collective_group,
)

# A posted receive occupies multiprocessors until its message arrives. This few still saturate a link within a node.
_MULTIPROCESSORS = 4


class Messages:
    """Channels of one rank. All ranks make them together.

    Args:
        planner: has the senders and receivers.
        groups: settings of the process groups, as for stock's own pipeline groups.

    Attributes:
        collective_group: all ranks of the pipeline with vocabulary parallelism; None without it.
    """

    def __init__(self, planner: Planner, groups: GroupFlags) -> None:
        pipelines, channels = _pipelines(), channels_of(planner.placement)
        how: dict[str, Any] = {
            "timeout": groups.timeout,
            "new_group": parallel_state.create_group,  # counts groups, for timeouts that change
        }
        self._make = partial(make_channels, pipelines, channels, **how)
        over = how | ({"options": partial(nccl_options, groups)} if "nccl" in dist.get_backend() else {})
        self._channels = make_channels(pipelines, channels, **over)
        self._shapes: Channels | None = None
        self.collective_group = make_collective_group(pipelines, **over) if planner.shares_vocabulary else None

    def transport(self, spec: MessageSpec, *, variable_lengths: bool) -> Transport:
        """Returns the transport for one run. All ranks must call it with the same arguments."""
        if not variable_lengths:
            return Transport(self._channels, spec)
        if self._shapes is None:
            self._shapes = self._make(backend="gloo")
        return Transport(self._channels, spec, shapes=self._shapes)


def nccl_options(groups: GroupFlags) -> Any:
    """NCCL options of one of our groups: those of ``pp``, with few multiprocessors unless their number is set.

    Their streams have high priority, so that messages start ahead of the blocks of a pass. A file that says otherwise
    is followed unless ``pp`` is among the flag's groups, as in stock.
    """
    config: dict[str, Any] = {}
    if groups.nccl_file is not None:
        import yaml  # type: ignore[import-untyped]  # only this flag needs it, as in stock

        with open(groups.nccl_file) as file:
            config = dict((yaml.safe_load(file) or {}).get("pp") or {})
    if not {"min_ctas", "max_ctas"} & config.keys():
        config["max_ctas"] = _MULTIPROCESSORS
    if groups.high_priority or "is_high_priority_stream" not in config:
        config["is_high_priority_stream"] = True
    return parallel_state.get_nccl_options("pp", {"pp": config})


def _pipelines() -> list[list[int]]:
    """Global ranks of every pipeline of the job. Collective over all ranks."""
    mine = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return [list(ranks) for ranks in sorted(set(of_all_ranks(tuple(mine))))]
