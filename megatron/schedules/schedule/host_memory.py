"""Host memory of offloaded activations: blocks that are allocated once and reused after the copy back."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.schedule.kinds import COMPUTING, KINDS, TO_HOST, Resource, using
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

# Largest ratio of a block to the requested size. Larger blocks are left for larger requests.
_MOST_SPARE = 2
# Extra size of a new block. Stages with equally many layers differ a little, and should be able to share blocks.
_SPARE = 1 / 32
# Kinds that allocate a block, kinds that copy to it, and kinds that copy back and free it.
_FILLS = frozenset(kind for kind in COMPUTING if not TO_HOST.isdisjoint(KINDS[kind].takes))
_OUT, _BACK = using(Resource.TO_HOST), using(Resource.FROM_HOST)


def made(size: float) -> float:
    """Returns the size of a new block for a request of ``size``."""
    return size * (1 + _SPARE)


def fitting(blocks: Sequence[float], size: float, least: float = 0.0) -> int | None:
    """Returns the index of the free block to use for ``size``; None if a new block is needed.

    It is the smallest block that fits, and the first of equal ones.

    Args:
        blocks: sizes of the free blocks.
        size: requested size.
        least: requests below this size accept blocks as large as a request of this size does.
    """
    candidates = [at for at, block in enumerate(blocks) if size <= block <= _MOST_SPARE * max(size, least)]
    return min(candidates, key=blocks.__getitem__, default=None)


def taken(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Returns the host memory of each rank, in microbatches of one rank's activations.

    A forward that an O follows allocates a block, and the L frees it. Blocks are not split and stages copy different
    sizes, so the total can exceed the peak of the offloaded activations.
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
