"""Warm-up: repeats a building block, with its first microbatches started as early as possible.

If a block is repeated without changes, the first backward on the last rank is as late as in the steady state, although
no pass collides with it yet. The last rank starts last, and a whole chain of backwards follows its own. Its waiting
time is therefore added to the makespan. Here the slots of the block apply only once the pipeline is full.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import count

from megatron.schedules.planner.named.building_blocks import Block
from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, Result
from megatron.schedules.schedule.schedule import Schedule


def pulled_together(block: Block, microbatches: int, ahead: int, name: str) -> Schedule:
    """Repeats ``block``. The forwards of its first ``ahead`` microbatches start as soon as they can.

    Every other pass waits for its slot in the repeated block. All slots are moved earlier by the time that the last
    rank can gain before its first backward. If a rank could start several passes, the one with the earliest slot is
    first. The peak memory depends on ``ahead``; the bound of the block does not apply to the result.
    """
    placement = block.placement
    gain = _gain(block)
    rows: list[list[Pass]] = [[] for _ in range(placement.ranks)]
    waiting: list[list[tuple[int, Pass]]] = [[] for _ in rows]
    free_at = [0] * placement.ranks
    due: defaultdict[int, list[Pass]] = defaultdict(list)

    def admit(work: Pass, ready: int) -> None:
        at_once = work.kind is Kind.F and work.microbatch < ahead
        due[ready if at_once else max(ready, block.slot(work) - gain)].append(work)

    for m in range(microbatches):
        admit(Pass(0, Kind.F, m), 0)
    for now in count():
        if not due and not any(waiting):
            break
        for work in due.pop(now, ()):
            heapq.heappush(waiting[placement.rank_of[work.stage]], (block.slot(work), work))
        for rank, queue in enumerate(waiting):
            if queue and free_at[rank] <= now:
                work = heapq.heappop(queue)[1]
                rows[rank].append(work)
                free_at[rank] = now + block.length[work.kind]
                for stage, kind in block.followers[work.stage, work.kind]:
                    admit(Pass(stage, kind, work.microbatch), free_at[rank])
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))


def _gain(block: Block) -> int:
    """Slots by which the first microbatch alone could reach its backward on the last rank earlier than in ``block``."""
    placement = block.placement
    first = placement.stages_of(placement.ranks - 1)[-1]
    earliest, at = 0, (0, Kind.F)
    while KINDS[at[1]].makes is not Result.GRADIENT or at[0] != first:
        earliest += block.length[at[1]]
        at = next(follower for follower in block.followers[at] if not KINDS[follower[1]].filler)
    return block.offset[at] - earliest
