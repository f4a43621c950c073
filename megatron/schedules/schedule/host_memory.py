"""Host memory that activations go to: blocks that are made once and used again when what they held has come back."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.schedule.kinds import KINDS, TO_HOST, Resource, using
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

# A block much larger than what is asked for is left to who needs so much.
_MOST_SPARE = 2
# Stages with as many layers differ by a little, such as the first one's input, and should find each other's blocks.
_SPARE = 1 / 32
# The kinds that take a block, that have it copied out, and whose copy back leaves it free.
_FILLS = frozenset(kind for kind in using(Resource.COMPUTE) if not TO_HOST.isdisjoint(KINDS[kind].takes))
_OUT, _BACK = using(Resource.TO_HOST), using(Resource.FROM_HOST)


def made(size: float) -> float:
    """How large a new block is where ``size`` is asked for."""
    return size * (1 + _SPARE)


def fitting(blocks: Sequence[float], size: float, least: float = 0.0) -> int | None:
    """Which of ``blocks``, sizes of those that are free, takes ``size``; None where a new one has to be made.

    The smallest that fits, and of equals the first. Sizes below ``least`` are all the same.
    """
    found = [at for at, block in enumerate(blocks) if size <= block <= _MOST_SPARE * max(size, least)]
    return min(found, key=blocks.__getitem__, default=None)


def taken(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """What each rank takes of its host, in microbatches' worth of one rank's activations.

    A block is taken by the pass that an O copies from, the forward, and given back at the place of its L. That may be
    more than ever is away at once: stages differ in what they copy, and a block is not cut.
    """
    return tuple(_taken(schedule, costs, rank) for rank in range(schedule.ranks))


def _taken(schedule: Schedule, costs: StageCosts, rank: int) -> float:
    row = schedule.order[rank]
    leaving = {(stage, m) for stage, kind, m in row if kind in _OUT}
    free: list[float] = []
    used: dict[tuple[int, int], float] = {}
    total = 0.0
    for stage, kind, m in row:
        if kind in _FILLS and (stage, m) in leaving:
            size = round(sum(costs.held[share][stage] for share in TO_HOST), 9)
            at = fitting(free, size)
            used[stage, m] = made(size) if at is None else free.pop(at)
            total += made(size) if at is None else 0.0
        elif kind in _BACK:
            free.append(used.pop((stage, m)))
    return round(total, 9)
