"""Report of a job's first training call: linears that split, offloaded bytes and peak memory, beside the plan's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import print_rank_0

from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.linears import local, transformer_engine
from megatron.schedules.integration.linears.output_layers import output_layers
from megatron.schedules.report.figures import amount
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.utils.printable import counted

_BEGIN = "pipeline schedule: first iteration: "
# Layers that offload a smaller part of their planned bytes are named, so many at most. Estimates are closer than that.
_FEW, _NAMED = 0.85, 4


class Seen(NamedTuple):
    """First training call of one rank.

    Args:
        linears: linears that have a split backward, by kind.
        fused: true if weight gradients are added to ``main_grad`` inside their product.
        moved: for each (stage, microbatch), bytes that each layer offloaded.
        peak: peak activation memory, bytes; 0 if not known.
    """

    linears: Counter[str]
    fused: bool
    moved: dict[tuple[int, int], list[int]]
    peak: int


def seen(chunks: Sequence[torch.nn.Module], offloads: Offloads | None, peak: int) -> Seen:
    """Returns what this rank knows at the end of the call, without waiting for its device."""
    linears: Counter[str] = Counter()
    for chunk in chunks:
        whole = output_layers(chunk)
        linears.update(type(each).__name__ for each in chunk.modules() if _splits(each) and each not in whole)
    fused = bool(get_model_config(chunks[0]).gradient_accumulation_fusion)
    return Seen(linears, fused, {} if offloads is None else offloads.moved, peak)


def report(planner: Planner, group: dist.ProcessGroup, mine: Seen) -> None:
    """Prints the report on the job's first rank. Collective over the pipeline; ranks wait for each other here, once."""
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, mine, group=group)
    planned = planner.timeline
    print_rank_0("\n".join(_BEGIN + line for line in lines(ranks, planner, planner.peak_bytes(planned))))


def lines(ranks: Sequence[Seen], planner: Planner, planned_peak: float | None) -> Iterator[str]:
    """Yields the report's lines.

    Args:
        ranks: what each pipeline rank saw.
        planner: has the plan.
        planned_peak: planned peak activation memory of the worst rank, bytes; None if not known.
    """
    yield _about_linears(ranks, splits=planner.first.splits)
    if any(rank.moved for rank in ranks):
        yield from _about_offload(ranks, planner.offloaded_bytes)
    peaks = [rank.peak for rank in ranks]
    if worst := max(peaks):
        planned = "" if planned_peak is None else f", planned {amount(planned_peak)}"
        yield f"peak activation memory {amount(worst)} on rank {peaks.index(worst)}{planned} on the worst rank"


def _splits(module: torch.nn.Module) -> bool:
    weights = (each for name, each in module.named_parameters(recurse=False) if name.startswith("weight"))
    return (local.is_split(module) or transformer_engine.is_split(module)) and any(w.requires_grad for w in weights)


def _about_linears(ranks: Sequence[Seen], *, splits: bool) -> str:
    if not splits:
        return "no linear splits its backward in this schedule"
    every = sum((rank.linears for rank in ranks), Counter[str]())
    kinds = ", ".join(f"{count} {name}" for name, count in every.most_common())
    fusion = "on" if ranks[0].fused else "off"
    found = f"{counted(every.total(), 'linear')} split the backward ({kinds or 'none'})"
    return f"{found}; gradient accumulation fusion is {fusion}"


def _about_offload(ranks: Sequence[Seen], planned: Sequence[Sequence[float]] | None) -> Iterator[str]:
    """Compares offloaded with planned bytes, and names the layers of which most stayed on the device."""
    by_stage: dict[int, list[list[int]]] = {}
    for rank in ranks:
        for (stage, _), sizes in rank.moved.items():
            by_stage.setdefault(stage, []).append(sizes)
    moved = amount(sum(sum(sizes) for forwards in by_stage.values() for sizes in forwards))
    if planned is None:
        yield f"offloaded {moved}"
        return
    yield f"offloaded {moved}, planned {amount(sum(len(f) * sum(planned[stage]) for stage, f in by_stage.items()))}"
    short = []
    for stage, forwards in by_stage.items():
        means = [sum(sizes) / len(forwards) for sizes in zip(*forwards, strict=True)]
        each = enumerate(zip(means, planned[stage], strict=False))
        short += [(wanted - mean, mean, layer, stage) for layer, (mean, wanted) in each if mean < _FEW * wanted]
    for stayed, mean, layer, stage in sorted(short, reverse=True)[:_NAMED]:
        yield (
            f"layer {layer} of stage {stage} offloaded {amount(mean)} of each microbatch, planned "
            f"{amount(mean + stayed)}: the rest stayed on the device, since more than the layer's backward needs it"
        )
