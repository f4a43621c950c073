"""Measures activation memory on device and host where the plan recomputes or offloads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.apart import tell_megatron
from benchmarks.parts import Claim, Row, Say, markdown_table, verdict
from megatron.schedules.job.flags import SEARCH_VARIABLE

WITHIN = 0.05
RANKS = 4
LIMITS = ("0.125", "0.25", "0.375", "0.5")
# Milliseconds, and the 10**9 bytes a second at which a copy one way takes about a quarter of the computing.
_COSTS, _GBPS = "10,11,7.5,0.5", "0.25"
MEMORY_SAVINGS = {
    "recompute": ["--pipeline-save-memory", "recompute"],
    "offload": ["--pipeline-save-memory", f"offload={_GBPS}"],
    "both": ["--pipeline-save-memory", f"both={_GBPS}"],
}


class Held(NamedTuple):
    """Memory of one rank, in bytes; the plan in microbatches.

    Args:
        planned: the most by plan, in microbatches' worth of an average rank's decoder layers.
        full: at most.
        blocks: what it takes of the host by plan, in the same microbatches' worth.
        said: of host memory, before the start.
        host: of host memory taken.
    """

    planned: float
    full: int
    blocks: float
    said: float
    host: int


def measure(model: Sequence[str], one: int, quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each limit and way to save memory.

    Args:
        model: its flags.
        one: bytes that a microbatch takes in an average rank's decoder layers.
        quick: a sample.
        say: is told what goes on.
    """
    from benchmarks.emulated_ranks import run_ranks

    for limit in LIMITS[1:2] if quick else LIMITS:
        for memory_saving in list(MEMORY_SAVINGS)[:2] if quick else MEMORY_SAVINGS:
            say(f"memory: {memory_saving} within {limit} on {RANKS} ranks")
            found = run_ranks(RANKS, partial(_train, model, limit, memory_saving), 300)
            yield memory_saving_row(limit, memory_saving, one, found)


def memory_saving_row(limit: str, memory_saving: str, one: int, found: Sequence[Held]) -> dict[str, Any]:
    """Returns each rank's bytes against the planned ones."""
    planned = [round(rank.planned * one) for rank in found]
    errors = [rank.full / plan - 1 for rank, plan in zip(found, planned, strict=True)]
    return {
        "memory_saving": memory_saving,
        "limit": float(limit),
        "pipeline_size": len(found),
        "microbatches": 2 * len(found),
        "one_microbatch_bytes": one,
        "planned_bytes": planned,
        "measured_bytes": [rank.full for rank in found],
        "worst_error": max(errors, key=abs),
        "planned_host_bytes": [round(rank.blocks * one) for rank in found],
        "reported_host_bytes": round(max(rank.said for rank in found)),
        "host_bytes": [rank.host for rank in found],
    }


def _train(model: Sequence[str], limit: str, memory_saving: str) -> Held:
    """Trains one iteration on this rank."""
    import torch.distributed as dist

    import pretrain_gpt
    from megatron.schedules.integration.schedule_function import ScheduleFunction
    from megatron.schedules.schedule.host_memory import taken
    from megatron.schedules.schedule.simulator import peaks

    tell_megatron()
    seen: list[Held] = []
    step = ScheduleFunction.__call__

    def noted(self: ScheduleFunction, **asked: Any) -> list[Any]:
        self.peaks.count_next_call()
        losses = step(self, **asked)
        schedule, costs, rank = self._planner.first, self._planner.timeline.costs, dist.get_rank()
        planned = peaks(schedule, costs)[rank]
        blocks = taken(schedule, costs)
        memory = self._planner.costs.in_bytes
        said = 0.0 if memory is None else max(blocks) * memory.of_rank(RANKS)
        host_bytes = 0 if self.model.offloads is None else self.model.offloads.host_bytes
        seen.append(Held(planned, self.peaks.bytes, blocks[rank], said, host_bytes))
        return losses

    ScheduleFunction.__call__ = noted  # type: ignore[method-assign]
    shape = f"--pipeline-model-parallel-size {RANKS} --global-batch-size {2 * RANKS} --pipeline-schedule adaptive"
    flags = f"--pipeline-memory-limit {limit} --pipeline-costs {_COSTS}"
    os.environ[SEARCH_VARIABLE] = "1"
    sys.argv = ["pretrain_gpt.py", *model, *shape.split(), *flags.split(), *MEMORY_SAVINGS[memory_saving]]
    pretrain_gpt.main()
    return seen[0]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about bytes on the device and on the host."""
    worst = max(rows, key=lambda row: abs(row["worst_error"]))
    found = [
        Claim(
            f"With recompute and offload every rank holds what is planned, within {WITHIN:.0%}",
            f"{worst['worst_error']:+.1%} at worst ({named(worst)})",
            verdict(abs(worst["worst_error"]) <= WITHIN),
        )
    ]
    offloaded = [row for row in rows if any(row["host_bytes"])]
    if off := {named(row): row["reported_host_bytes"] / max(row["host_bytes"]) - 1 for row in offloaded}:
        name = max(off, key=lambda name: abs(off[name]))
        found.append(
            Claim(
                f"A job takes as much host memory as it says before it starts, within {WITHIN:.0%}",
                f"{off[name]:+.1%} at worst ({name})",
                verdict(abs(off[name]) <= WITHIN),
            )
        )
    return found


def section(rows: Sequence[Row]) -> str:
    """Returns a line for each limit."""
    how = (
        f"With recompute, offload ({_GBPS} GB/s) or both, `adaptive` on four ranks within a fraction of 1F1B's memory: "
        "measured device memory over planned, on the rank that is furthest off, and KiB on the host that takes most."
    )
    savings = list(dict.fromkeys(str(row["memory_saving"]) for row in rows))
    found = {(row["limit"], row["memory_saving"]): row for row in rows}
    table = []
    for limit in dict.fromkeys(row["limit"] for row in rows):
        at = [found.get((limit, memory_saving)) for memory_saving in savings]
        device = ["" if row is None else f"{row['worst_error']:+.1%}" for row in at]
        host = ["" if row is None else f"{max(row['host_bytes']) / 1024:.0f}" for row in at]
        table.append([f"{limit:.1%}", *device, *host])
    heads = [f"{what}, {memory_saving}" for what in ("device", "host") for memory_saving in savings]
    return f"{how}\n\n{markdown_table(['within', *heads], table)}"


def named(row: Row) -> str:
    """Names the memory saving and the limit of a row."""
    return f"{row['memory_saving']} within {row['limit']:.1%}"
