"""A job as typed data, made by the command line, the Python API, or from Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron.schedules.estimate.build import Build, Shape
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.model_build import StockRecompute, TrainedModel
from megatron.schedules.estimate.parallel_sizes import Sizes
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
    """The flags of this package, and two settings from the environment.

    Args:
        schedule, memory_limit, costs, layers, saving, vocabulary_parallel, plan_lengths, measuring, replan, dry_run: a
            flag each.
        search_seconds: of an adaptive search; None for the default.
        stall_seconds: without a finished pass, after which the job stops; 0 for no limit.
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
        """Whether the flag, not Megatron's own flags, partitions the layers."""
        return self.layers not in (None, "even")

    def searches_layers(self, *, known: bool) -> bool:
        """Whether the planner searches the layer partition: ``auto`` does, of a ``known`` model, without the flag."""
        return self.layers == "auto" or (self.layers is None and self.schedule.name == AUTO and known)

    @property
    def measures_limit(self) -> bool:
        """Whether the job measures its memory limit."""
        return self.memory_limit is not None and self.memory_limit.is_measured

    @property
    def replans(self) -> bool:
        """Whether the job replans from measurements."""
        return self.replan or self.measures_limit

    @property
    def parts(self) -> tuple[str, ...]:
        """Given parts of a request that only some schedules use."""
        given = {
            "csv": self.schedule.file is not None,
            "memory_limit": self.memory_limit is not None,
            "recompute": self.saving.recompute,
            "offload": self.saving.offload,
        }
        return tuple(part for part, is_given in given.items() if is_given)


@dataclass(frozen=True)
class Batch:
    """Samples of an iteration.

    Args:
        micro: of a microbatch; None where not given.
        whole: of an iteration; None for one microbatch.
        steps: ``--step-batch-size-schedule``.
    """

    micro: int | None = None
    whole: int | None = None
    steps: str | None = None


@dataclass(frozen=True)
class StockLayers:
    """Decoder layers of stages by Megatron's own flags.

    Args:
        count: of the model.
        first, last: of the first and the last stage.
        layout: ``--pipeline-model-parallel-layout``.
        stand_in: whether the embedding and the output layer count as a layer each.
        ahead: layers of multi-token prediction.
    """

    count: int | None = None
    first: int | None = None
    last: int | None = None
    layout: str | None = None
    stand_in: tuple[bool, bool] = (False, False)
    ahead: int = 0

    @property
    def by_hand(self) -> bool:
        """Whether a flag gives the layers of single stages."""
        return any(flag is not None for flag in (self.first, self.last, self.layout))


@dataclass(frozen=True)
class StockFlags:
    """Megatron's other arguments, as far as compatibility rules read them.

    Args:
        given: names of those set to anything but None, False, 0 or ``none``.
        transformer_impl, checkpoint_format, dataloader_type: the values of these three.
        fp8_recipe: how linears are quantized to FP8; empty where they are not.
    """

    given: frozenset[str] = frozenset()
    transformer_impl: str = "local"
    checkpoint_format: str = "torch_dist"
    dataloader_type: str | None = None
    fp8_recipe: str = ""


@dataclass(frozen=True)
class Model:
    """The model, its vocabulary as Megatron pads it.

    Args:
        build: how Megatron builds it.
        numbers: bytes of each parameter, of an optimizer that is not shared.
    """

    build: Build
    numbers: Numbers


@dataclass(frozen=True)
class JobSpec:
    """A job.

    Args:
        settings: of this package.
        sizes: parallel sizes.
        batch: samples of an iteration.
        layers: of stages by Megatron's flags.
        recompute: Megatron's own.
        vocabulary: words as padded, where a flag or a checkpoint gives it.
        vocabulary_multiple: to whose multiple Megatron pads the words of each tensor-parallel rank.
        microbatches: of an iteration, where given; otherwise they follow from ``batch``.
        iterations: of training; None where not given.
        csv: text of the schedule's CSV; None without one, or before it is read.
        model: None where its sizes come from a checkpoint, or before it is read.
        stock: Megatron's other arguments, for the rules that name single ones.
    """

    settings: Settings
    sizes: Sizes
    batch: Batch = field(default_factory=Batch)
    layers: StockLayers = field(default_factory=StockLayers)
    recompute: StockRecompute = field(default_factory=StockRecompute)
    vocabulary: int | None = None
    vocabulary_multiple: int = 1
    microbatches: int | None = None
    iterations: int | None = None
    csv: str | None = None
    model: Model | None = None
    stock: StockFlags = field(default_factory=StockFlags)

    @property
    def build(self) -> Build | None:
        """The model as built, its vocabulary as this job pads it."""
        if self.model is None:
            return None
        build = self.model.build
        if not self.settings.vocabulary_parallel:
            return build
        return replace(build, shape=replace(build.shape, vocabulary=self.divisible(build.shape.vocabulary)))

    @property
    def shape(self) -> Shape | None:
        """The model's sizes, its vocabulary as this job pads it."""
        return None if self.build is None else self.build.shape

    @property
    def trained(self) -> TrainedModel | None:
        """The model as this job trains it."""
        if self.model is None or self.build is None:
            return None
        numbers = replace(self.model.numbers, shared_by=self.sizes.optimizer_shared_by)
        return TrainedModel(self.build, numbers, self.recompute.kept, self.layers.stand_in)

    def under(self, name: str, **settings: Any) -> JobSpec:
        """This job with another schedule, and without what only the one it has uses.

        Args:
            name: of the schedule.
            settings: more fields of the :class:`.Settings` to change.
        """
        plain: dict[str, Any] = {"memory_limit": None, "saving": MemorySaving()}
        changed = replace(self.settings, schedule=ScheduleChoice(name, name), **(plain | settings))
        return replace(self, settings=changed, csv=None)

    def divisible(self, words: int) -> int:
        """The fewest words, from ``words`` on, that all tensor and pipeline ranks share evenly."""
        return self.sizes.divisible(words, self.vocabulary_multiple)
