"""The memory that every rank of a job takes, from its flags and its plan alone."""

from __future__ import annotations

from typing import NamedTuple

from megatron.schedules.estimate.build import Shape
from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.model_build import rank_memory
from megatron.schedules.integration.flags.check import PlannedJob
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


def estimated(asked: PlannedJob, planner: Planner) -> Estimate:
    """The memory of every rank of the job.

    Args:
        asked, planner: the plan and its programs.

    Raises:
        PlanError: where flags leave the model's sizes to a checkpoint.
    """
    shape, model, request = asked.spec.shape, asked.spec.trained, asked.request
    counts = request.layers_on(planner.placement)
    if shape is None or model is None or counts is None or request.costs.memory is None:
        raise PlanError(f"{FLAGS['dry_run']} needs the model's sizes: give their flags")
    found = rank_memory(model, planner.first, planner.timeline.costs, request, planner.messages)
    return Estimate(found, counts, shape, model.build.shape.fused)
