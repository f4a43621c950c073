"""Memory of every rank of a job, computed from its flags and its plan."""

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
    """Memory estimate of a job.

    Args:
        ranks: memory of each pipeline rank.
        counts: decoder layers of each stage.
        shape: sizes of the model.
        fused: whether attention is counted as one kernel.
    """

    ranks: tuple[RankMemory, ...]
    counts: tuple[int, ...]
    shape: Shape
    fused: bool

    @property
    def worst(self) -> int:
        """Index of the rank with the highest device memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].device)


def estimated(asked: PlannedJob, planner: Planner) -> Estimate:
    """Returns the memory of every rank of the job.

    Args:
        asked: the planned job.
        planner: its plans and programs.

    Raises:
        PlanError: the model's sizes come from a checkpoint.
    """
    shape, model, request = asked.spec.shape, asked.spec.trained, asked.request
    counts = request.layers_on(planner.placement)
    if shape is None or model is None or counts is None or request.costs.memory is None:
        raise PlanError(f"{FLAGS['dry_run']} needs the model's sizes: give their flags")
    found = rank_memory(model, planner.first, planner.timeline.costs, request, planner.messages)
    return Estimate(found, counts, shape, model.build.shape.fused)
