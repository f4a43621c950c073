"""Checkpoints that stock Megatron and every other schedule can load.

These functions replace stock's saving and loading. The reason for each is in :mod:`.hooks` and :mod:`.core_hooks`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from torch import Tensor

from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.session import Session, Stock


def generate_state_dict(stock: Stock, session: Session, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Removes our layout from the arguments that are saved in a checkpoint."""
    if isinstance(getattr(args, "pipeline_model_parallel_layout", None), PlacedLayout):
        args = copy.copy(args)
        args.pipeline_model_parallel_layout = None
    return stock(args, *rest, **kwargs)


def load_base_checkpoint(
    stock: Stock, session: Session, load_dir: Any, args: Any, rank0: bool = False, **kwargs: Any
) -> Any:
    """Refuses the old checkpoint format if it would load layers into the wrong stages."""
    loaded = stock(load_dir, args, rank0=rank0, **kwargs)
    moved = session.planner is not None and not session.planner.placement.looped
    # The last value is None if there is no checkpoint. Versions have its type in different modules.
    if moved and not rank0 and getattr(loaded[-1], "name", None) == "LEGACY":
        raise RuntimeError(
            f"{load_dir} is in the format torch, which does not say what layers it holds where this schedule puts "
            "others: load and save it once without --pipeline-schedule, with --ckpt-convert-format torch_dist"
        )
    return loaded


def for_two_copies(mend: Callable[[dict[str, Any]], None]) -> Stock:
    """Returns the replacement of a function that changes a state dict: ``mend`` follows it on ranks with two copies."""

    def replacement(stock: Stock, session: Session, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        stock(state_dict, *args, **kwargs)
        if session.two_copies:
            mend(state_dict)

    return replacement


def write_once(sharded_state_dict: dict[str, Any]) -> None:
    """Selects one of this rank's copies of each tensor part for writing.

    Stock selects a rank, and so all its copies.
    """
    written = set()
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            part = _sharded_tensor_shard_id(shard)
            if part in written:
                shard.replica_id = 1
            written.add(part)


def own_tensors(loaded: dict[str, Any]) -> None:
    """Gives each of the two copies its own tensors. Stock reads a tensor once and uses it for both copies."""
    seen = set()

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in seen:
                return value.clone()
            seen.add(id(value))
        return value

    dict_list_map_inplace(own, loaded)
