"""The memory that every rank of a job takes, from its flags and its plan alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.megatron_flags import divisible
from megatron.schedules.estimate.model_build import as_built, rank_memory
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.integration.flags.check import Planned
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.layers.arithmetic import shape_of
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


def estimated(args: Any, asked: Planned, planner: Planner) -> Estimate:
    """The memory of every rank of the job.

    Args:
        args: Megatron's, parsed but not validated.
        asked, planner: the plan and its programs.

    Raises:
        PlanError: where flags leave the model's sizes to a checkpoint.
    """
    shape, request = shape_of(args), asked.request
    counts = request.layers_on(planner.placement)
    if shape is None or counts is None or request.costs.memory is None:
        raise PlanError(f"{FLAGS['dry_run']} needs the model's sizes: give their flags")
    if request.costs.shared_vocabulary:
        shape = replace(shape, vocabulary=divisible(shape.vocabulary, args))
    build = as_built(args, shape)
    found = rank_memory(args, build, planner.first, planner.timeline.costs, request, planner.messages)
    return Estimate(found, counts, shape, build.shape.fused)
