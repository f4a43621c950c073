"""Layers of several kinds in a measured profile, which has times and bytes of whole stages only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.schedules.schedule.model_loads import Load, ModelLoads
from megatron.schedules.schedule.model_memory import ModelMemory


def spread_loads(measured: ModelLoads, estimated: ModelLoads, counts: Sequence[int]) -> ModelLoads:
    """Returns ``measured`` with each stage's load spread over its layers as estimated.

    Args:
        measured: loads with equal layers on each stage.
        estimated: loads of the same layers.
        counts: layers of each stage that was measured.
    """
    pairs = zip(measured.layers, estimated.layers, strict=True)
    rows = _spread([(one.split, other.split) for one, other in pairs], counts)
    layers = (part._replace(split=Load(*row)) for part, row in zip(measured.layers, rows, strict=True))
    return replace(measured, layers=tuple(layers))


def spread_memory(measured: ModelMemory, estimated: ModelMemory, counts: Sequence[int]) -> ModelMemory:
    """Returns ``measured`` with each stage's activations spread over its layers as estimated; arguments likewise."""
    pairs = zip(measured.layers, estimated.layers, strict=True)
    rows = _spread([(one[:3], other[:3]) for one, other in pairs], counts)
    layers = [
        one._replace(full=full, kept=kept, weights=weights)
        for one, (full, kept, weights) in zip(measured.layers, rows, strict=True)
    ]
    return replace(measured, layers=tuple(layers))


def _spread(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], counts: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """Yields the measured amounts of each layer, given measured and estimated amounts of each."""
    begin = 0
    for count in counts:
        stage = pairs[begin : begin + count]
        if not stage:
            continue
        whole, guess = ([sum(column) for column in zip(*rows, strict=True)] for rows in zip(*stage, strict=True))
        for measured, estimated in stage:
            columns = zip(measured, estimated, whole, guess, strict=True)
            yield tuple(total * part / of if of else own for own, part, total, of in columns)
        begin += count
