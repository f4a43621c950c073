"""What would make a job fit its device: changes of its flags, each planned and counted before it is named."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from megatron.schedules.integration.dry_run import Estimate, estimated
from megatron.schedules.integration.flags.check import check
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.layers.arithmetic import shape_of

_MOST = 3
_GIB = 2.0**30
# Such plans need not be good, only possible.
_SEARCH_SECONDS = "1"


def advice(args: Any, found: Estimate, room: float) -> str:
    """One line: flags with each of which alone it fits, or, where there are none, the one that helps most.

    Args:
        args: the job's.
        found: what it holds.
        room: bytes of a device.
    """
    held = {}
    for flags, changes in _candidates(args, found, room):
        worst = _worst(args, changes)
        if worst is not None and worst < found.ranks[found.worst].device:
            held[flags] = worst
        if sum(each <= room for each in held.values()) == _MOST:
            break
    fitting = [f"{flags} ({worst / _GIB:.2f} GiB)" for flags, worst in held.items() if worst <= room]
    if fitting:
        return f"would fit: with {', or '.join(fitting)}"
    if held:
        best = min(held, key=held.__getitem__)
        return f"of single flags none is enough; {best} helps most ({held[best] / _GIB:.2f} GiB): use more GPUs too"
    return "no single flag that was tried helps: use more GPUs"


def _candidates(args: Any, found: Estimate, room: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Flags, and what they are parsed to; those first that cost least time."""
    if not args.use_distributed_optimizer:
        yield "--use-distributed-optimizer", {"use_distributed_optimizer": True}
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield "--sequence-parallel", {"sequence_parallel": True}
    if not args.pipeline_vocabulary_parallel:
        yield "--pipeline-vocabulary-parallel", {"pipeline_vocabulary_parallel": True}
    plain = dict.fromkeys(
        ("pipeline_schedule_chunks", "pipeline_schedule_file", "pipeline_memory_limit", "pipeline_search_seconds")
    )
    relief = {"pipeline_recompute": None, "pipeline_offload": None}
    for name in ("v-half", "v-min"):
        if args.pipeline_schedule != name:
            yield f"--pipeline-schedule {name}", {**plain, **relief, "pipeline_schedule": name}
    limit = _limit(args, found, room)
    if limit is not None:
        adaptive = plain | {
            "pipeline_schedule": "adaptive",
            "pipeline_memory_limit": f"{limit:.2f}",
            "pipeline_search_seconds": _SEARCH_SECONDS,
        }
        said = f"--pipeline-schedule adaptive --pipeline-memory-limit {limit:.2f}"
        yield said, adaptive
        if args.recompute_granularity != "full":
            yield f"{said} --pipeline-recompute auto", {**adaptive, "pipeline_recompute": "auto"}
    if args.recompute_granularity is None and args.pipeline_recompute in (None, "none"):
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", full


def _limit(args: Any, found: Estimate, room: float) -> float | None:
    """The part of 1F1B's activation memory that the worst rank has room for, rounded down; None where there is none."""
    shape = shape_of(args)
    worst = found.ranks[found.worst]
    left = room - worst.static - worst.messages
    if shape is None or left <= 0:
        return None
    whole = _worst_activations(args)
    if whole is None:
        return None
    return min(0.95, int(95 * left / whole) / 100) or None


def _worst_activations(args: Any) -> float | None:
    """What 1F1B would hold of activations on the rank that holds most."""
    changes = dict.fromkeys(
        ("pipeline_schedule_chunks", "pipeline_schedule_file", "pipeline_memory_limit", "pipeline_search_seconds"),
    ) | {"pipeline_schedule": "1f1b", "pipeline_recompute": None, "pipeline_offload": None}
    found = _changed(args, changes)
    return None if found is None else max(each.activations for each in found.ranks)


def _worst(args: Any, changes: Mapping[str, Any]) -> float | None:
    found = _changed(args, changes)
    return None if found is None else found.ranks[found.worst].device


def _changed(args: Any, changes: Mapping[str, Any]) -> Estimate | None:
    """The estimate of the job with ``changes``; None where it would be refused."""
    others = copy.copy(args)
    for name, value in changes.items():
        setattr(others, name, value)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            asked = check(others)
            return None if asked is None else estimated(others, asked, Planner(asked))
        except (SystemExit, ValueError):
            return None
