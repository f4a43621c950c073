"""What would make a job fit its device: changes of its flags, each planned and counted before it is named."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from megatron.schedules.integration.flags.check import check
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.flags.settings import settings_of
from megatron.schedules.integration.memory_estimate import Estimate, estimated
from megatron.schedules.utils.errors import PlanError

_MOST = 3
_GIB = 2.0**30
# Such plans need not be good, only possible.
_SEARCH_SECONDS = 1.0
_ADAPTIVE = "--pipeline-schedule adaptive --pipeline-memory-limit {:.2f}"
# Less by a thousandth is no help.
_LESS = 0.999
# What a plan asks for beside its schedule's name.
_PLAIN: Mapping[str, Any] = dict.fromkeys(("pipeline_memory_limit", "pipeline_save_memory"))


def advice(args: Any, found: Estimate, room: float) -> str:
    """One line: flags with each of which alone it fits, or a few with which together it does.

    Args:
        args: the job's.
        found: what it holds.
        room: bytes of a device.
    """
    flags: list[str] = []
    for _ in range(_MOST):
        better = list(_better(args, found, room))
        fitting = [each for each in better if each.device <= room]
        if fitting:
            also = f"{' and '.join(flags)}, and " if flags else ""
            return f"would fit: with {also}{', or '.join(map(str, fitting))}"
        if not better:
            break
        best = min(better, key=lambda each: each.device)
        flags.append(str(best))
        args, found = best.args, best.found
    if not flags:
        return "no flag that was tried helps: use more GPUs"
    return f"nothing that was tried is enough: use more GPUs. Most helps {' and '.join(flags)}"


class _Changed(NamedTuple):
    """The job with other flags.

    Args:
        flags: as they are written.
        args, found: what they are parsed to, and what the job then holds.
    """

    flags: str
    args: Any
    found: Estimate

    @property
    def device(self) -> float:
        """Bytes on the rank that holds most."""
        return self.found.ranks[self.found.worst].device

    def __str__(self) -> str:
        return f"{self.flags} ({self.device / _GIB:.2f} GiB)"


def _better(args: Any, found: Estimate, room: float) -> Iterator[_Changed]:
    """What holds less than ``found`` on the rank that holds most; no more than a few that fit."""
    fitting = 0
    for flags, changes in _candidates(args, found, room):
        if fitting and changes.get("pipeline_save_memory"):
            return  # which takes long to plan
        changed = _changed(args, changes)
        if changed is None:
            continue
        each = _Changed(flags, *changed)
        if each.device < _LESS * found.ranks[found.worst].device:
            yield each
            fitting += each.device <= room
        if fitting == _MOST:
            return


def _candidates(args: Any, found: Estimate, room: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Flags, and what they are parsed to; those first that cost least time."""
    if not args.use_distributed_optimizer:
        yield "--use-distributed-optimizer", {"use_distributed_optimizer": True}
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield "--sequence-parallel", {"sequence_parallel": True}
    if not args.pipeline_vocabulary_parallel:
        yield "--pipeline-vocabulary-parallel", {"pipeline_vocabulary_parallel": True}
    for name in ("v-half", "v-min"):
        if args.pipeline_schedule != name:
            yield f"--pipeline-schedule {name}", {**_PLAIN, "pipeline_schedule": name}
    limit = _limit(args, found, room)
    adaptive = {
        **_PLAIN,
        "pipeline_schedule": "adaptive",
        "pipeline_memory_limit": f"{limit or 1:.2f}",
    }
    if limit is not None:
        yield _ADAPTIVE.format(limit), adaptive
    if args.recompute_granularity is None and not settings_of(args).saving.recompute:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", full
    if limit is not None and args.recompute_granularity != "full":
        yield (
            f"{_ADAPTIVE.format(limit)} --pipeline-save-memory recompute",
            {**adaptive, "pipeline_save_memory": "recompute"},
        )


def _limit(args: Any, found: Estimate, room: float) -> float | None:
    """What is left of the room, as a part of 1F1B's activation memory, rounded down; None where nothing is."""
    worst = found.ranks[found.worst]
    changed = _changed(args, {**_PLAIN, "pipeline_schedule": "1f1b"})
    left = room - worst.static - worst.messages
    if changed is None or left <= 0:
        return None
    whole = max(each.activations for each in changed[1].ranks)
    # The worst rank may hold a little more than its share, that of the ends.
    return int(95 * min(1.0, left / whole)) / 100 or None


def _changed(args: Any, changes: Mapping[str, Any]) -> tuple[Any, Estimate] | None:
    """The job with ``changes``, and what it holds; None where it would be refused."""
    others = copy.copy(args)
    for name, value in changes.items():
        setattr(others, name, value)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            adaptive = others.pipeline_schedule.startswith("adaptive")
            asked = check(others, _SEARCH_SECONDS if adaptive else None)
            return None if asked is None else (others, estimated(others, asked, Planner(asked)))
        except (SystemExit, PlanError):
            return None
