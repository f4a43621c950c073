"""Building blocks: one microbatch's passes with their offsets, repeated every interval (arXiv 2405.15362, section 3).

A block fixes everything about the steady state. How long its passes' activations live, over the interval, bounds the
memory of any number of microbatches: this is how a schedule's memory is chosen before the schedule exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.schedule import Schedule


@dataclass(frozen=True)
class Block:
    """A building block on a grid of equal slots.

    Args:
        placement: where the stages live.
        interval: T, slots from one microbatch to the next.
        offset: start slot of every (stage, kind) for microbatch 0.
        length: how many slots a pass of each kind takes.
    """

    placement: Placement
    interval: int
    offset: Mapping[tuple[int, Kind], int]
    length: Mapping[Kind, int]

    @property
    def backward(self) -> Kind:
        """The backward pass that the stage before waits for: I where the block splits it, else B."""
        return Kind.I if Kind.I in self.kinds else Kind.B

    def followers(self, stage: int, kind: Kind) -> list[tuple[int, Kind]]:
        """What may start once pass ``kind`` of ``stage`` has ended: the next pass along the chain, and W after I."""
        last, backward, found = self.placement.last_stage, self.backward, []
        if kind is Kind.F:
            found.append((stage + 1, Kind.F) if stage < last else (last, backward))
        elif kind is backward and stage:
            found.append((stage - 1, backward))
        if kind is Kind.I:
            found.append((stage, Kind.W))
        return found

    def lifespan(self, stage: int) -> int:
        """Slots from the start of a stage's F to the end of its last backward pass."""
        last = max(self.offset[s, k] + self.length[k] for s, k in self.offset if s == stage)
        return last - self.offset[stage, Kind.F]

    def peak_bound(self, rank: int) -> float:
        """At most this many microbatches' activations are held at once: sum of ceil(l / T) over the rank's chunks."""
        chunks = self.placement.stages_of(rank)
        return sum(math.ceil(self.lifespan(stage) / self.interval) for stage in chunks) / len(chunks)

    def collisions(self) -> list[str]:
        """Pairs of passes of one rank that would run at once when the block repeats; empty for a sound block."""
        found = []
        for rank in range(self.placement.ranks):
            taken: dict[int, tuple[int, Kind]] = {}
            for stage in self.placement.stages_of(rank):
                for kind in self.kinds:
                    for slot in range(self.offset[stage, kind], self.offset[stage, kind] + self.length[kind]):
                        other = taken.setdefault(slot % self.interval, (stage, kind))
                        if other != (stage, kind):
                            found.append(f"rank {rank}: {other[0]}{other[1]} and {stage}{kind}")
        return found

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of pass this block has, F first."""
        return tuple(sorted({kind for _, kind in self.offset}))

    def repeat(self, microbatches: int, name: str) -> Schedule:
        """The schedule of ``microbatches`` copies of the block, each one interval after the last."""
        rows = []
        for rank in range(self.placement.ranks):
            starts = [
                (self.offset[stage, kind] + m * self.interval, Pass(stage, kind, m))
                for stage in self.placement.stages_of(rank)
                for kind in self.kinds
                for m in range(microbatches)
            ]
            rows.append(tuple(work for _, work in sorted(starts)))
        return Schedule(name, self.placement, microbatches, tuple(rows))


def with_weights(placement: Placement, interval: int, offset: Mapping[tuple[int, Kind], int]) -> Block:
    """Complete a block of unit slots that has F and I: each W takes the first slot after its I that is still free.

    Raises:
        PlanError: where F and I already collide or the interval is shorter than a rank's work: no such block exists.
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
