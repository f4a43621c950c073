"""What the flags of this package say of a job, as typed values."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.schedules.job.values import (
    CostsChoice,
    DryRun,
    Layers,
    Measuring,
    MemoryLimit,
    MemorySaving,
    ScheduleChoice,
)
from megatron.schedules.planner.registry import AUTO


@dataclass(frozen=True)
class Settings:
    """The flags of training that are ours, and the environment's two settings.

    Args:
        schedule, memory_limit, costs, layers, saving, vocabulary_parallel, plan_lengths, measuring, replan, dry_run: a
            flag each.
        search_seconds: of an adaptive search; None for the usual effort.
        stall_seconds: for which no pass may finish before the job stops; 0 for no limit.
    """

    schedule: ScheduleChoice
    memory_limit: MemoryLimit | None = None
    costs: CostsChoice | None = None
    layers: Layers | None = None
    saving: MemorySaving = field(default_factory=MemorySaving)
    vocabulary_parallel: bool = False
    plan_lengths: bool = False
    measuring: Measuring | None = None
    replan: bool = False
    dry_run: DryRun | None = None
    search_seconds: float | None = None
    stall_seconds: float = 120.0

    @property
    def places_layers(self) -> bool:
        """Whether the flag, not Megatron's own flags, says where layers are."""
        return self.layers not in (None, "even")

    def searches_layers(self, *, known: bool) -> bool:
        """Whether the planner searches the layer partition: ``auto`` does, of a ``known`` model, without the flag."""
        return self.layers == "auto" or (self.layers is None and self.schedule.name == AUTO and known)

    @property
    def measures_limit(self) -> bool:
        """Whether the memory limit comes from what devices have left."""
        return self.memory_limit is not None and self.memory_limit.is_measured

    @property
    def replans(self) -> bool:
        """Whether the job plans again for what it measures."""
        return self.replan or self.measures_limit

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a request that not every schedule heeds, and that are given."""
        given = {
            "csv": self.schedule.file is not None,
            "memory_limit": self.memory_limit is not None,
            "again": self.saving.recompute,
            "offload": self.saving.offload,
        }
        return tuple(part for part, is_given in given.items() if is_given)
