"""Collects the report of a job's first training call from the ranks of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.linears import local, transformer_engine
from megatron.schedules.integration.linears.output_layers import output_layers
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.report.first_iteration import Expected, Seen, lines
from megatron.schedules.runtime.offload import Offloads


def seen(chunks: Sequence[torch.nn.Module], offloads: Offloads | None, peak: int, waits: Counter[str] | None) -> Seen:
    """Returns what this rank knows at the end of the call, without waiting for its device."""
    linears: Counter[str] = Counter()
    for chunk in chunks:
        whole = output_layers(chunk)
        linears.update(type(each).__name__ for each in chunk.modules() if _splits(each) and each not in whole)
    fused = bool(get_model_config(chunks[0]).gradient_accumulation_fusion)
    return Seen(linears, fused, {} if offloads is None else offloads.moved, peak, waits)


def report(planner: Planner, group: dist.ProcessGroup, mine: Seen) -> None:
    """Prints the report on the job's first rank. Collective over the pipeline; ranks wait for each other here, once."""
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, mine, group=group)
    expected = Expected(planner.first.splits, planner.offloaded_bytes, planner.peak_bytes(planner.timeline))
    print_rank_0("\n".join(f"pipeline schedule: first iteration: {line}" for line in lines(ranks, expected)))


def _splits(module: torch.nn.Module) -> bool:
    weights = (each for name, each in module.named_parameters(recurse=False) if name.startswith("weight"))
    return (local.is_split(module) or transformer_engine.is_split(module)) and any(w.requires_grad for w in weights)
