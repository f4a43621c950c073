"""Job as typed data, made by the command line, by the Python API, or from Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.layer_pattern import PIPE
from megatron.schedules.estimate.model_build import StockRecompute, TrainedModel
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.job.values import (
    CostsChoice,
    DryRun,
    Layers,
    Measuring,
    MemoryLimit,
    MemorySaving,
    ScheduleChoice,
)
from megatron.schedules.measure.cost_file import CustomCosts, read_costs
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.parsing import read_text


@dataclass(frozen=True)
class Settings:
    """Flags of this package, and two settings from the environment.

    Args:
        schedule, memory_limit, costs, layers, saving, vocabulary_parallel, plan_lengths, measuring, replan: value of
            the flag with this name.
        verify, dry_run: the same.
        search_seconds: time limit of an adaptive search, seconds; None for the default.
        stall_seconds: the job stops if no pass finishes for this long, seconds; 0 for no limit.
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
    verify: bool = False
    dry_run: DryRun | None = None
    search_seconds: float | None = None
    stall_seconds: float = 120.0

    @property
    def places_layers(self) -> bool:
        """True if our flag sets the layer partition instead of Megatron's own flags."""
        return self.layers not in (None, "even")

    @property
    def measures_limit(self) -> bool:
        """True if the job measures its memory limit."""
        return self.memory_limit is not None and self.memory_limit.is_measured

    @property
    def replans(self) -> bool:
        """True if the job replans from measurements."""
        return self.replan or self.measures_limit

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the request that are set and that only some schedules use."""
        given = {
            "csv": self.schedule.file is not None,
            "memory_limit": self.memory_limit is not None,
            "recompute": self.saving.recompute,
            "offload": self.saving.offload,
        }
        return tuple(part for part, is_given in given.items() if is_given)


@dataclass(frozen=True)
class Batch:
    """Batch sizes in samples.

    Args:
        micro: samples in a microbatch; None if not given.
        whole: samples in an iteration; None for one microbatch.
        steps: value of ``--step-batch-size-schedule``.
    """

    micro: int | None = None
    whole: int | None = None
    steps: str | None = None


@dataclass(frozen=True)
class StockLayers:
    """Decoder layers of each stage, as set by Megatron's own flags.

    Args:
        count: layers of the model.
        first: layers of the first stage.
        last: layers of the last stage.
        layout: value of ``--pipeline-model-parallel-layout``.
        stand_in: whether the embedding and the output layer count as one layer each.
        ahead: layers of multi-token prediction.
        pattern: decoder layers of a hybrid model, a letter for each, with ``|`` between stages if it places them; None
            if all layers are transformer layers.
    """

    count: int | None = None
    first: int | None = None
    last: int | None = None
    layout: str | None = None
    stand_in: tuple[bool, bool] = (False, False)
    ahead: int = 0
    pattern: str | None = None

    @property
    def by_hand(self) -> bool:
        """True if a flag sets the layers of single stages."""
        return self.segmented or any(flag is not None for flag in (self.first, self.last, self.layout))

    @property
    def segmented(self) -> bool:
        """True if the pattern of a hybrid model places its layers."""
        return PIPE in (self.pattern or "")


@dataclass(frozen=True)
class StockFlags:
    """Megatron's other arguments that the compatibility rules read.

    Args:
        given: names of the arguments whose value is set, and not one that switches them off.
        transformer_impl: value of this argument.
        checkpoint_format: value of this argument.
        dataloader_type: value of this argument.
        fp8_recipe: FP8 recipe of the linears; empty without FP8.
        cuda_graphs: what captures CUDA graphs, as ``--cuda-graph-impl`` names it; empty without them.
    """

    given: frozenset[str] = frozenset()
    transformer_impl: str = "local"
    checkpoint_format: str = "torch_dist"
    dataloader_type: str | None = None
    fp8_recipe: str = ""
    cuda_graphs: str = ""


@dataclass(frozen=True)
class JobModel:
    """Model with its vocabulary as Megatron pads it.

    Args:
        build: settings with which Megatron builds the model.
        numbers: bytes per parameter, for an optimizer that is not sharded.
    """

    build: Build
    numbers: Numbers


@dataclass(frozen=True)
class JobSpec:
    """Complete description of a job.

    Args:
        settings: settings of this package.
        sizes: parallel sizes.
        batch: batch sizes in samples.
        layers: layers of each stage, as set by Megatron's flags.
        recompute: Megatron's own recompute.
        vocabulary: padded vocabulary size, if a flag or a checkpoint gives it.
        vocabulary_multiple: Megatron pads the words of each tensor-parallel rank to a multiple of this number.
        microbatches: microbatches in an iteration, if given; otherwise computed from ``batch``.
        iterations: training iterations; None if not given.
        csv: text of the schedule's CSV; None without a CSV, or before it is read.
        cost_file: content of the cost file; None without one, or before it is read.
        times: times of the model's parts on a device, if they were estimated; None for the model's arithmetic. Those
            of a flag or a cost file go before.
        model: the model; None if a checkpoint has its sizes, or before it is read.
        hides_messages: whether weight gradients hide the messages of experts, by Megatron's flag; None if they do
            wherever the costs contain such messages.
        is_built: whether the model is built already, so that only what Megatron reads in each forward may change.
        gpu: name of the device that the job runs on; empty if unknown.
        stock: Megatron's other arguments, for rules about single arguments.
        flags: the user's flag for each part of a request, for errors; see :meth:`.PlanError.told`.
    """

    settings: Settings
    sizes: ParallelSizes
    batch: Batch = field(default_factory=Batch)
    layers: StockLayers = field(default_factory=StockLayers)
    recompute: StockRecompute = field(default_factory=StockRecompute)
    vocabulary: int | None = None
    vocabulary_multiple: int = 1
    microbatches: int | None = None
    iterations: int | None = None
    csv: str | None = None
    cost_file: JobProfile | CustomCosts | None = None
    times: Costs | None = None
    model: JobModel | None = None
    hides_messages: bool | None = None
    is_built: bool = False
    gpu: str = ""
    stock: StockFlags = field(default_factory=StockFlags)
    flags: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def by_megatron(self) -> bool:
        """True if Megatron's arguments describe the job, so that their rules hold; false without a job to train."""
        return "model" not in self.flags

    @property
    def profile(self) -> JobProfile | None:
        """The cost file, if it was measured."""
        return None if isinstance(self.cost_file, CustomCosts) else self.cost_file

    @property
    def custom_costs(self) -> CustomCosts | None:
        """The cost file, if it was written by hand."""
        return self.cost_file if isinstance(self.cost_file, CustomCosts) else None

    @property
    def knows_layers(self) -> bool:
        """True if the flags or a measured cost file say what the embedding, the layers and the output layer cost."""
        profile = self.profile
        return self.model is not None or (profile is not None and profile.costs(self.sizes.pipeline).model is not None)

    @property
    def build(self) -> Build | None:
        """The model as built, with its vocabulary as this job pads it."""
        if self.model is None:
            return None
        build = self.model.build
        if not self.settings.vocabulary_parallel:
            return build
        return replace(build, shape=replace(build.shape, vocabulary=self.divisible(build.shape.vocabulary)))

    @property
    def shape(self) -> Shape | None:
        """Sizes of the model, with its vocabulary as this job pads it."""
        return None if self.build is None else self.build.shape

    @property
    def trained(self) -> TrainedModel | None:
        """The model as this job trains it."""
        if self.model is None or self.build is None:
            return None
        numbers = replace(self.model.numbers, shared_by=self.sizes.optimizer_shared_by)
        ends = self.layers.first, self.layers.last
        return TrainedModel(self.build, numbers, self.recompute.kept, self.layers.stand_in, ends)

    def read(self) -> JobSpec:
        """Returns this job with the content of its CSV and of its cost file.

        Raises:
            PlanError: what is wrong with a file.
        """
        csv, costs = self.settings.schedule.file, self.settings.costs
        return replace(
            self,
            csv=None if csv is None else read_text(csv, "csv"),
            cost_file=None if costs is None or costs.file is None else read_costs(costs.file),
        )

    def under(self, name: str, **settings: Any) -> JobSpec:
        """Returns this job with another schedule, without the settings that only the current schedule uses.

        Args:
            name: name of the schedule.
            settings: other fields of :class:`.Settings` to change.
        """
        plain: dict[str, Any] = {"memory_limit": None, "saving": MemorySaving()}
        changed = replace(self.settings, schedule=ScheduleChoice(name, name), **(plain | settings))
        return replace(self, settings=changed, csv=None)

    def divisible(self, words: int) -> int:
        """Smallest vocabulary size of at least ``words`` that divides evenly over all tensor and pipeline ranks."""
        return self.sizes.divisible(words, self.vocabulary_multiple)
