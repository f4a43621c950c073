"""Report of a job's first training call: linears that split, offloaded bytes and peak memory, beside the plan's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megatron.schedules.utils.printable import amount, counted

# Layers that offload a smaller share of their planned bytes are named, because estimates are closer than that. At most
# so many layers, or places in the code, are named.
_FEW, _NAMED = 0.85, 4


class Seen(NamedTuple):
    """First training call of one rank.

    Args:
        linears: linears that have a split backward, by kind.
        fused: true if weight gradients are added to ``main_grad`` inside their product.
        moved: for each (stage, microbatch), bytes that each layer offloaded.
        peak: peak activation memory, bytes; 0 if not known.
        waits: how often the host waited for its device, by file and line; None if not known.
        whole: linears, besides output layers, that computed their weight gradient in I, by kind and reason.
        partial: parameters whose own hooks ran in I and again in W of a microbatch, each time with a part of the
            gradient.
    """

    linears: Counter[str]
    fused: bool
    moved: dict[tuple[int, int], list[int]]
    peak: int
    waits: Counter[str] | None = None
    whole: Mapping[tuple[str, str], int] = MappingProxyType({})
    partial: Sequence[str] = ()


class ExpectedFigures(NamedTuple):
    """Figures that the plan expects of the call.

    Args:
        splits: true if the schedule splits backwards.
        offloaded: bytes of each offloaded layer of each stage, for one microbatch; None if the sizes are unknown.
        peak: peak activation memory of the worst rank, bytes; None if the sizes are unknown.
    """

    splits: bool
    offloaded: Sequence[Sequence[float]] | None = None
    peak: float | None = None


def lines(ranks: Sequence[Seen], expected: ExpectedFigures) -> Iterator[str]:
    """Yields the report's lines, from what each pipeline rank saw."""
    yield _about_linears(ranks, splits=expected.splits)
    if expected.splits:
        yield from _about_exceptions(ranks)
    if any(rank.moved for rank in ranks):
        yield from _about_offload(ranks, expected.offloaded)
    peaks = [rank.peak for rank in ranks]
    if worst := max(peaks):
        planned = "" if expected.peak is None else f", planned {amount(expected.peak)} on the worst rank"
        yield f"peak activation memory {amount(worst)} on rank {peaks.index(worst)}{planned}"
    known = [rank.waits for rank in ranks if rank.waits is not None]
    if known:
        yield _about_waits(sum(known, Counter[str]()))


def _about_linears(ranks: Sequence[Seen], *, splits: bool) -> str:
    if not splits:
        return "no linear splits its backward in this schedule"
    every = sum((rank.linears for rank in ranks), Counter[str]())
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(every.items()))
    fusion = "on" if ranks[0].fused else "off"
    split = f"{counted(every.total(), 'linear')} split the backward ({kinds or 'none'})"
    return f"{split}; gradient accumulation fusion is {fusion}"


def _about_exceptions(ranks: Sequence[Seen]) -> Iterator[str]:
    """Names linears that do not split, and parameters whose hooks see parts of gradients."""
    whole = sum((Counter(rank.whole) for rank in ranks), Counter[tuple[str, str]]())
    if whole:
        kinds = ", ".join(f"{count} {name}: {why}" for (name, why), count in sorted(whole.items()))
        yield f"{counted(whole.total(), 'linear')} did not split ({kinds})"
    partial = [f"{name} (rank {rank})" for rank, seen in enumerate(ranks) for name in seen.partial]
    if partial:
        named = ", ".join(partial[:_NAMED]) + (", ..." if len(partial) > _NAMED else "")
        yield (
            f"the hooks of {counted(len(partial), 'parameter')} ran twice for a microbatch, each time with a part of "
            f"the gradient, because not only their linears use them: {named}"
        )


def _about_waits(waits: Counter[str]) -> str:
    if not waits:
        return "the host waited for its device nowhere in the passes"
    places = ", ".join(f"{place} ({count})" for place, count in waits.most_common(_NAMED))
    return f"the host waited for its device {counted(waits.total(), 'time')} in the passes, most often at {places}"


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
        layers = enumerate(zip(means, planned[stage], strict=False))
        short += [(wanted - mean, mean, layer, stage) for layer, (mean, wanted) in layers if mean < _FEW * wanted]
    for stayed, mean, layer, stage in sorted(short, reverse=True)[:_NAMED]:
        yield (
            f"layer {layer} of stage {stage} offloaded {amount(mean)} of each microbatch, planned "
            f"{amount(mean + stayed)}: the rest stayed on the device, since more than the layer's backward needs it"
        )
