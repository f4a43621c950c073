"""Bytes of activations that ranks really hold where the plan recomputes or offloads, on the device and on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron.schedules.job.flags import SEARCH_VARIABLE
from tools.benchmarks.apart import tell_megatron
from tools.benchmarks.parts import Row, Say, markdown_table

WITHIN = 0.05
RANKS = 4
LIMITS = ("0.125", "0.25", "0.375", "0.5")
# Milliseconds, and the 10**9 bytes a second at which a copy one way takes about a quarter of the computing.
_COSTS, _GBPS = "10,11,7.5,0.5", "0.25"
RELIEFS = {
    "recompute": ["--pipeline-save-memory", "recompute"],
    "offload": ["--pipeline-save-memory", f"offload={_GBPS}"],
    "both": ["--pipeline-save-memory", f"both={_GBPS}"],
}


class Held(NamedTuple):
    """What one rank held, in bytes but for the plan.

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
    """A row for each limit and what may be done to keep within it.

    Args:
        model: its flags.
        one: bytes that a microbatch takes in an average rank's decoder layers.
        quick: a sample.
        say: is told what goes on.
    """
    from tools.benchmarks.emulated_ranks import run_ranks

    for limit in LIMITS[1:2] if quick else LIMITS:
        for relief in list(RELIEFS)[:2] if quick else RELIEFS:
            say(f"memory: {relief} within {limit} on {RANKS} ranks")
            found = run_ranks(RANKS, partial(_train, model, limit, relief), 300)
            yield relief_row(limit, relief, one, found)


def relief_row(limit: str, relief: str, one: int, found: Sequence[Held]) -> dict[str, Any]:
    """Each rank's bytes against planned microbatches times the bytes of one."""
    planned = [round(rank.planned * one) for rank in found]
    errors = [rank.full / plan - 1 for rank, plan in zip(found, planned, strict=True)]
    return {
        "relief": relief,
        "limit": float(limit),
        "pipeline_size": len(found),
        "microbatches": 2 * len(found),
        "one_microbatch_bytes": one,
        "planned_bytes": planned,
        "measured_bytes": [rank.full for rank in found],
        "worst_error": max(errors, key=abs),
        "planned_host_bytes": [round(rank.blocks * one) for rank in found],
        "said_host_bytes": round(max(rank.said for rank in found)),
        "host_bytes": [rank.host for rank in found],
    }


def _train(model: Sequence[str], limit: str, relief: str) -> Held:
    """One iteration of training on this rank."""
    import torch.distributed as dist

    import pretrain_gpt
    from megatron.schedules.integration.flags.memory_saving import check_host
    from megatron.schedules.integration.schedule_function import ScheduleFunction
    from megatron.schedules.schedule.host_memory import taken
    from megatron.schedules.schedule.simulator import peaks

    tell_megatron()
    seen: list[Held] = []
    step = ScheduleFunction.__call__

    def noted(self: ScheduleFunction, **asked: Any) -> list[Any]:
        self.count_next_call()
        losses = step(self, **asked)
        schedule, costs, rank = self._planner.first, self._planner.timeline.costs, dist.get_rank()
        planned = peaks(schedule, costs)[rank]
        blocks = taken(schedule, costs)
        said = check_host(self._planner.costs, max(blocks), RANKS, is_dry=False)
        seen.append(Held(planned, self.peak_activation_bytes, blocks[rank], said, self.host_bytes))
        return losses

    ScheduleFunction.__call__ = noted  # type: ignore[method-assign]
    shape = f"--pipeline-model-parallel-size {RANKS} --global-batch-size {2 * RANKS} --pipeline-schedule adaptive"
    flags = f"--pipeline-memory-limit {limit} --pipeline-costs {_COSTS}"
    os.environ[SEARCH_VARIABLE] = "1"
    sys.argv = ["pretrain_gpt.py", *model, *shape.split(), *flags.split(), *RELIEFS[relief]]
    pretrain_gpt.main()
    return seen[0]


def section(rows: Sequence[Row]) -> str:
    """The claims, then every plan's worst rank."""
    worst = max(rows, key=lambda row: abs(row["worst_error"]))
    text = [
        f"Every rank holds what is planned with recompute and offload, within {100 * WITHIN:.0f} %: at worst "
        f"{100 * worst['worst_error']:+.1f} % ({_named(worst)}), {_verdict(abs(worst['worst_error']) <= WITHIN)}\n",
        *_host([row for row in rows if any(row["host_bytes"])]),
        "The same training under `adaptive` with a memory limit and `--pipeline-save-memory` `recompute`, `offload` "
        f"with {_GBPS} GB/s, or `both`; passes are told to take {_COSTS} ms. Planned is the plan in bytes of a "
        "microbatch that 1F1B holds in an average rank's decoder layers. Of the host each rank takes blocks, which it "
        "uses again; what a rank says before the start is the model's arithmetic.\n",
    ]
    heads = ["within 1F1B's", "by", "worst rank, KiB", "planned, KiB", "worst error of a rank"]
    heads += ["host of a rank, KiB", "planned, KiB", "said before, KiB"]
    return "\n".join([*text, markdown_table(heads, [_cells(row) for row in rows])])


def _host(rows: Sequence[Row]) -> Iterator[str]:
    """Of those that offload."""
    if rows:
        off = {_named(row): row["said_host_bytes"] / max(row["host_bytes"]) - 1 for row in rows}
        worst = max(off, key=lambda name: abs(off[name]))
        yield (
            f"Host memory said before the start is what the rank with most takes, within {100 * WITHIN:.0f} %: at "
            f"worst {100 * off[worst]:+.1f} % ({worst}), {_verdict(abs(off[worst]) <= WITHIN)}\n"
        )


def _named(row: Row) -> str:
    return f"{row['relief']} within {row['limit']:.1%}"


def _verdict(held: bool) -> str:
    return "**held**" if held else "**not held**"


def _cells(row: Row) -> list[str]:
    pairs = [("measured_bytes", "planned_bytes"), ("host_bytes", "planned_host_bytes")]
    cells = []
    for measured, planned in pairs:
        worst = max(range(len(row[measured])), key=row[measured].__getitem__)
        cells.append([f"{row[name][worst] / 1024:.0f}" for name in (measured, planned)])
    said = f"{row['said_host_bytes'] / 1024:.0f}"
    return [f"{row['limit']:.1%}", row["relief"], *cells[0], f"{100 * row['worst_error']:+.1f} %", *cells[1], said]
