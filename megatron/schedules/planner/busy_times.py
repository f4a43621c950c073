"""Computing times of the ranks under many layer partitions at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.planner.partition_plans import Partition, with_layers
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.kinds import COMPUTING, Kind
from megatron.schedules.schedule.placement import Placement


class BusyTimes:
    """Computing times of the ranks under many partitions, without costs made anew for each.

    The time of a stage depends on its last layer and on the number of its layers alone.

    Args:
        request: the request, whose model is known.
        where: the placement.
    """

    def __init__(self, request: Request, where: Placement) -> None:
        self._request, self._placement = request, where
        self._stages = [list(where.stages_of(rank)) for rank in range(where.ranks)]
        layers = len(request.costs.model.layers)
        # Of F and of all computing, by stage, number of layers up to its last one, and number of its own.
        self._times = np.zeros((2, where.stages, layers + 1, layers + 1))
        self._known = np.zeros((where.stages, layers + 1, layers + 1), dtype=np.bool_)

    def of(self, partitions: Sequence[Partition], microbatches: int) -> NDArray[np.float64]:
        """Computing time of each rank, after the forwards that lead to its first stage; a row for each partition."""
        counts = np.array(partitions)
        index = np.arange(counts.shape[1]), counts.cumsum(axis=1), counts
        for row in np.flatnonzero(~self._known[index].all(axis=1)):
            self._learn(partitions[int(row)])
        forwards, every = self._times[:, *index]
        heads = np.pad(forwards.cumsum(axis=1), ((0, 0), (1, 0)))
        busy = [heads[:, stages[0]] + microbatches * _summed(every[:, stages].T) for stages in self._stages]
        return np.stack(busy, axis=1)

    def _learn(self, partition: Partition) -> None:
        index = np.arange(len(partition)), np.cumsum(partition), np.array(partition)
        if self._known[index].all():  # since the partitions before
            return
        times = with_layers(self._request, partition).costs_on(self._placement).times
        computing = (of_stages for kind, of_stages in times.items() if kind in COMPUTING)
        self._times[:, *index] = times[Kind.F], [sum(of_stage) for of_stage in zip(*computing, strict=True)]
        self._known[index] = True


def _summed(parts: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Adds arrays as :func:`sum` adds floats, with the rounding errors, so that moves that are equal stay so."""
    total = lost = np.zeros(())
    for part in parts:
        now = total + part
        lost = lost + np.where(abs(total) >= abs(part), (total - now) + part, (part - now) + total)
        total = now
    return np.asarray(total + lost)
