"""A job as plain data: what its flags say of model, sizes and settings, before anything is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.model_build import StockRecompute, TrainedModel
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.job.settings import Settings


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes.

    Args:
        world: processes of the job.
        tensor, pipeline, context, expert, expert_tensor: ranks of each kind of parallelism.
        has_experts: whether layers have any.
        optimizer_instances: copies of a distributed optimizer's state; 0 where it is not distributed.
    """

    world: int
    pipeline: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    has_experts: bool = False
    optimizer_instances: int = 0

    @property
    def of_replica(self) -> int:
        """Ranks of one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def least_world(self) -> int:
        """The fewest processes on which every part of the model has its place."""
        experts = self.expert_tensor * self.expert if self.has_experts else 1
        return self.pipeline * math.lcm(self.tensor * self.context, experts)

    @property
    def optimizer_shared_by(self) -> tuple[int, int]:
        """Ranks that share the optimizer's state of dense parameters, and of experts'."""
        if not self.optimizer_instances:
            return 1, 1
        dense, experts = self.tensor * self.pipeline, self.expert_tensor * self.expert * self.pipeline
        each = self.world // self.optimizer_instances
        return max(1, each // dense), max(1, each // experts)


@dataclass(frozen=True)
class Batch:
    """Samples of an iteration.

    Args:
        micro: of a microbatch; None where no flag says it.
        whole: of an iteration; None for one microbatch.
        steps: ``--step-batch-size-schedule``.
    """

    micro: int | None = None
    whole: int | None = None
    steps: str | None = None


@dataclass(frozen=True)
class StockLayers:
    """Where Megatron's own flags put decoder layers.

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
        """Whether a flag says how many layers single stages hold."""
        return any(flag is not None for flag in (self.first, self.last, self.layout))


@dataclass(frozen=True)
class StockFlags:
    """Megatron's other arguments, as far as rules about what works together read them.

    Args:
        given: names of those that are set to anything but nothing, false, zero or ``none``.
        transformer_impl, checkpoint_format, dataloader_type: the values of these three.
    """

    given: frozenset[str] = frozenset()
    transformer_impl: str = "local"
    checkpoint_format: str = "torch_dist"
    dataloader_type: str | None = None


@dataclass(frozen=True)
class Model:
    """The model, its vocabulary as Megatron pads it.

    Args:
        shape: its sizes.
        build: how Megatron builds it.
        numbers: bytes of each parameter, of an optimizer that is not shared.
    """

    shape: Shape
    build: Build
    numbers: Numbers


@dataclass(frozen=True)
class JobSpec:
    """A job.

    Args:
        settings: of this package.
        sizes: parallel sizes.
        batch: samples of an iteration.
        layers: where Megatron's flags put layers.
        recompute: Megatron's own.
        vocabulary: words as padded, where a flag or a checkpoint says it.
        vocabulary_multiple: to whose multiple Megatron pads the words of each tensor-parallel rank.
        microbatches: of an iteration, where a flag says it; elsewhere they follow from ``batch``.
        iterations: of training; None where no flag says it.
        csv: text of the schedule's CSV; None where it has none, or it is not read yet.
        model: None where its sizes are left to a checkpoint, or not read yet.
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
    def shape(self) -> Shape | None:
        """The model's sizes, its vocabulary as this job pads it."""
        return None if self.model is None else self._padded(self.model.shape)

    @property
    def build(self) -> Build | None:
        """The model as built, its vocabulary as this job pads it."""
        return None if self.model is None else replace(self.model.build, shape=self._padded(self.model.build.shape))

    @property
    def numbers(self) -> Numbers:
        """Bytes of each parameter."""
        assert self.model is not None, "asked for where the model is known"
        return replace(self.model.numbers, shared_by=self.sizes.optimizer_shared_by)

    @property
    def tokens(self) -> float:
        """Of a microbatch on one rank."""
        assert self.model is not None, "asked for where the model is known"
        return (self.batch.micro or 1) * self.model.shape.sequence / self.sizes.context

    @property
    def trained(self) -> TrainedModel | None:
        """The model as this job trains it."""
        build = self.build
        if build is None:
            return None
        return TrainedModel(build, self.numbers, self.recompute.kept, self.tokens, self.layers.stand_in)

    def divisible(self, words: int) -> int:
        """As many words as Megatron would have, or the fewest more that all tensor and pipeline ranks share evenly."""
        across = self.sizes.tensor * self.sizes.pipeline
        multiple = self.sizes.tensor * math.lcm(self.vocabulary_multiple, self.sizes.pipeline)
        return words if words % across == 0 else -(-words // multiple) * multiple

    def _padded(self, shape: Shape) -> Shape:
        shared = self.settings.vocabulary_parallel
        return replace(shape, vocabulary=self.divisible(shape.vocabulary)) if shared else shape
