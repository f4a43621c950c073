"""Costs of models whose layers differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part


def uneven(costs: Costs, times: Sequence[float], held: Sequence[float] | None = None) -> Costs:
    """Returns the costs of layers that take ``times`` as long as those of ``costs``.

    Args:
        costs: costs of equal layers.
        times: relative time of each layer; 0 for a layer that takes none.
        held: relative activation memory of each layer; None if all are equal. The unit of memory is their mean.
    """
    loads = zip(times, held or (1.0,) * len(times), strict=True)
    layers = tuple(Part(split=Load(time, time, time, memory)) for time, memory in loads)
    mean = statistics.fmean(times)
    return replace(
        costs, layers=costs.layers.scaled(lambda time: mean * time), model=ModelLoads(Part(), layers, Part())
    )
