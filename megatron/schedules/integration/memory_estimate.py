"""The memory that every rank of a job takes, from its flags and its plan alone."""

from __future__ import annotations

from typing import NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory, memory
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.integration.flags.check import Planned
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.utils.errors import PlanError


class Estimate(NamedTuple):
    """What a job would hold.

    Args:
        ranks: every pipeline rank's memory.
        counts: decoder layers of each stage.
        shape: the model's.
        fused: whether attention is counted as one kernel.
    """

    ranks: tuple[RankMemory, ...]
    counts: tuple[int, ...]
    shape: Shape
    fused: bool

    @property
    def worst(self) -> int:
        """The rank that holds most on its device."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].device)


def estimated(asked: Planned, planner: Planner) -> Estimate:
    """The memory of every rank of the job.

    Args:
        asked, planner: the plan and its programs.

    Raises:
        PlanError: where flags leave the model's sizes to a checkpoint.
    """
    spec, placement, costs = asked.spec, planner.placement, asked.request.costs
    shape, build = spec.shape, spec.build
    counts = costs.layers_on(placement)
    if shape is None or build is None or counts is None or costs.memory is None:
        raise PlanError(f"{FLAGS['dry_run']} needs the model's sizes: give their flags")
    found = memory(
        planner.first,
        planner.timeline.costs,
        costs.memory,
        counts,
        parameters(build).by_stage(counts, placement.rank_of, costs.shared_vocabulary),
        spec.numbers,
        [count * spec.message_bytes for count in planner.messages],
    )
    return Estimate(found, counts, shape, build.shape.fused)
