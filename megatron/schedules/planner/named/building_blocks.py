"""Building blocks: the offsets of one microbatch's passes, repeated every interval (arXiv 2405.15362, section 3).

A block defines the steady state of a schedule. The lifespan of its activations, divided by the interval, bounds the
memory for any number of microbatches. So the memory is known before the schedule is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, StageKind, everywhere, followers
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
        found = {kind for _, kind in self.offset}
        return tuple(kind for kind in KINDS if kind in found)

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
