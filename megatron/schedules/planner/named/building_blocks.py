"""Building blocks: the offsets of one microbatch's passes, repeated every interval (arXiv 2405.15362, section 3).

A block defines the steady state of a schedule. The lifespan of its activations, divided by the interval, bounds the
memory for any number of microbatches. So the memory is known before the schedule is built.

If a block is repeated without changes, the first backward on the last rank is as late as in the steady state, although
no pass collides with it yet. The last rank starts last, and a whole chain of backwards follows its own. Its waiting
time is therefore added to the makespan. With :func:`pulled_together`, the slots of the block apply only once the
pipeline is full.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, Result, StageKind, everywhere, followers
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class Block:
    """A building block on a grid of equal slots.

    Args:
        placement: placement of the stages.
        interval: slots from one microbatch to the next, T.
        offset: start slot of each (stage, kind) for microbatch 0.
        length: slots of a pass of each kind.
    """

    placement: Placement
    interval: int
    offset: Mapping[StageKind, int]
    length: Mapping[Kind, int]

    @cached_property
    def followers(self) -> dict[StageKind, list[StageKind]]:
        """For each pass of a microbatch, the passes that depend on it."""
        return followers(self.placement, everywhere(self.placement, self.kinds))

    def lifespan(self, stage: int) -> int:
        """Slots from the start of a stage's F to the end of its last backward pass."""
        last = max(self.offset[s, k] + self.length[k] for s, k in self.offset if s == stage)
        return last - self.offset[stage, Kind.F]

    def peak_bound(self, rank: int) -> float:
        """Upper bound of the rank's peak memory, microbatches: mean of ceil(lifespan / T) over its chunks."""
        chunks = self.placement.stages_of(rank)
        return sum(math.ceil(self.lifespan(stage) / self.interval) for stage in chunks) / len(chunks)

    def slot(self, work: Pass) -> int:
        """Start slot of ``work`` in the repeated block. Two passes of a rank never have the same slot."""
        return self.offset[work.stage, work.kind] + self.interval * work.microbatch

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of pass in the block."""
        kinds = {kind for _, kind in self.offset}
        return tuple(kind for kind in KINDS if kind in kinds)

    def repeat(self, microbatches: int, name: str) -> Schedule:
        """Returns the schedule of ``microbatches`` copies of the block, one per interval."""
        here: list[list[tuple[int, int, int, Kind]]] = [[] for _ in range(self.placement.ranks)]
        for (stage, kind), offset in self.offset.items():
            here[self.placement.rank_of[stage]].append((offset % self.interval, offset // self.interval, stage, kind))
        rows = [
            tuple(
                Pass(stage, kind, turn - later)
                for turn in range(microbatches + max(later for _, later, _, _ in works))
                for _, later, stage, kind in works
                if 0 <= turn - later < microbatches
            )
            for works in map(sorted, here)
        ]
        return Schedule(name, self.placement, microbatches, tuple(rows))


def with_weights(placement: Placement, interval: int, offset: Mapping[StageKind, int]) -> Block:
    """Adds W to a block of unit slots that has F and I. Each W gets the first free slot after its I.

    Raises:
        PlanError: if F and I collide, or the interval is shorter than a rank's work, so that no such block exists.
    """
    length = {Kind.F: 1, Kind.I: 1, Kind.W: 1}
    complete = dict(offset)
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        taken = {offset[stage, kind] % interval for stage in stages for kind in (Kind.F, Kind.I)}
        if len(taken) != 2 * len(stages) or interval < 3 * len(stages):
            raise PlanError(f"the building block collides on rank {rank} of {placement.ranks}")
        for stage in sorted(stages, key=lambda s: offset[s, Kind.I]):
            slot = offset[stage, Kind.I] + 1
            while slot % interval in taken:
                slot += 1
            taken.add(slot % interval)
            complete[stage, Kind.W] = slot
    return Block(placement, interval, complete, length)


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
