"""Checks of a loop's model at its first call: is it built for the schedule, and may it be wrapped as it is?

Other wrappers than Megatron's expect that a backward follows each forward and is whole. Torch's ``fully_shard`` reduces
and frees a module's weights when a gradient has reached the module's input, which in a split backward is before W.
Torch's ``DistributedDataParallel`` reduces once a forward has run since the last reduction, so what it reduces depends
on the order of passes. Gradients would be wrong without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.gradient_reduction import reduced
from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import NAMES, splits
from megatron.schedules.schedule.placement import Placement

_OURS = "megatron.core.distributed.DistributedDataParallel"
# Modules with classes of these packages, in their own or as torch changes it, are wrapped by torch.
_TORCHS = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")
# What torch calls the function that changes a module's class to one with this base.
_FUNCTIONS = {"FSDPModule": "fully_shard", "ReplicateModule": "replicate", "DDP": "replicate"}
_SHARDED = ("FSDPModule", "ReplicateModule")
_GROUPS = (dist.ProcessGroup, dist.DeviceMesh)


def refuse_unfit(chunks: Sequence[Any], schedule: ScheduleChoice, placement: Placement | None = None) -> None:
    """Ends the process with status 2 if ``chunks`` cannot be trained. Collective over all ranks: all end or none does.

    Args:
        chunks: model chunks of this rank.
        schedule: the schedule that is asked for.
        placement: of the stages of these chunks; None if they are where stock has them.
    """
    own = (_misplaced(chunks, placement), _wrapped(chunks, schedule.name), _unsynchronized(chunks))
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, next(filter(None, own), ""))
    if why := next(filter(None, reasons), ""):
        refuse(f"{FLAGS['schedule']} {schedule.text} {why}")


def _misplaced(chunks: Sequence[Any], placement: Placement | None) -> str:
    """Reason why layers, the embedding or the output layer are not where ``placement`` has them; empty if they are."""
    if placement is None or placement.looped or placement.chunks != len(chunks):
        return ""
    stages = placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    ends = [(stage == 0, stage == placement.last_stage) for stage in stages]
    layout = get_model_config(chunks[0]).pipeline_model_parallel_layout
    in_place = (_ends(chunk) in (None, end) for chunk, end in zip(chunks, ends, strict=True))
    if isinstance(layout, PlacedLayout) and all(in_place):
        return ""
    return (
        "places layers itself, and this model has them where stock does: megatron.schedules.install() came too late; "
        "call it before the process groups, the model's configuration and the model are made"
    )


def _ends(chunk: Any) -> tuple[bool, bool] | None:
    """Returns whether ``chunk`` has the embedding and whether it has the output layer; None if it does not say."""
    try:
        return bool(get_attr_wrapped_model(chunk, "pre_process")), bool(get_attr_wrapped_model(chunk, "post_process"))
    except RuntimeError:
        return None


def _wrapped(chunks: Iterable[Any], schedule: str) -> str:
    """Reason why gradients would be wrong in a wrapper among ``chunks``; empty if they are right, or as in stock."""
    whole = [name for name in NAMES if not splits(name)]
    for name, module in (named for chunk in chunks for named in _modules(chunk)):
        wrapper = _wrapper(module)
        if wrapper is None:
            continue
        expects, working, instead = "stock's order of passes", ["1f1b"], ""
        if wrapper.__name__ in _SHARDED:
            expects, working, instead = "whole backwards", whole, f", or use {' or '.join(whole)}"
        elif wrapper.__module__.startswith("megatron"):  # Megatron-FSDP
            expects, working = "Megatron's own schedules", []
        if schedule not in working:
            where = f" of {name}" if name else ""
            return (
                f"does not work with {_written(wrapper)}{where}, which expects {expects}: wrap the model in {_OURS} "
                f"instead{instead}"
            )
    return ""


def _modules(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yields the wrappers of the model in ``chunk``, modules or not, and all modules in it, by name."""
    around = chunk
    while around is not None:
        yield "", around
        around = getattr(around, "module", None)
    yield from chunk.named_modules()


def _wrapper(module: Any) -> type | None:
    """Returns the class that makes ``module`` a wrapper that is not Megatron's; None if it is no such wrapper.

    It is one of torch's classes, or has torch's method that switches the reduction of gradients off, or has a process
    group and another module under the name that Megatron looks for.
    """
    if isinstance(module, (DistributedDataParallel, TorchFullyShardedDataParallel)):  # the latter uses fully_shard
        return None
    bases = type(module).__mro__
    torchs = [base for base in bases if base.__module__.startswith(_TORCHS)]
    if torchs:
        return next((base for base in torchs if base.__name__ in _FUNCTIONS), torchs[0])
    known = any(base.__module__.startswith("megatron.") for base in bases)
    if hasattr(type(module), "no_sync") or (not known and hasattr(module, "module") and _has_group(module)):
        return type(module)
    return None


def _has_group(module: Any) -> bool:
    """Returns whether ``module`` itself holds a process group, or a list or dictionary of them."""
    for value in getattr(module, "__dict__", {}).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(member, _GROUPS) for member in values):
            return True
    return False


def _written(wrapper: type) -> str:
    package = wrapper.__module__.partition(".")[0]
    return f"{package}'s {_FUNCTIONS.get(wrapper.__name__, wrapper.__name__)}"


def _unsynchronized(chunks: Iterable[Any]) -> str:
    """Reason why the loop's ``no_sync_func`` would have no effect; empty if it has one or there is none."""
    wanted = any(get_model_config(chunk).no_sync_func is not None for chunk in chunks)
    if not wanted or all(reduced(chunk) is not None for chunk in chunks):
        return ""
    return f"knows no_sync_func of {_OURS} only: wrap the model in it, or set no no_sync_func in the configuration"
