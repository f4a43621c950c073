"""A method with parallel and microbatch sizes, as a job."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.schedules.cli.options import FLAGS
from megatron.schedules.estimate.device_memory import model_memory
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.model_build import StockRecompute, TrainedModel
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.plans import model_fields
from megatron.schedules.job.spec import JobSpec, Settings, StockLayers
from megatron.schedules.job.stage_layers import layers_by_stage
from megatron.schedules.job.values import MemorySaving, ScheduleChoice
from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement, sequential
from megatron.schedules.utils.errors import PlanError
from tools._job_specs import OVERLAP, placed, placement_of, timed, under, without
from tools._methods import Method

NONE = StockRecompute()


@dataclass(frozen=True)
class Setting:
    """A method, with parallel and microbatch sizes.

    Args:
        method: the schedule.
        model, device: the model and the GPU.
        data, tensor, pipeline: parallel sizes. A pipeline of one rank is stock's without pipeline parallelism.
        micro_batch: samples of a microbatch.
        global_batch: samples of an iteration.
        correction: measured over modelled times of a layer's passes, see :func:`.roofline.corrections`.
        context, expert: the other parallel sizes.
        recompute: Megatron's own recompute.
        lost: Megatron's arguments that a schedule of ours does not work with.
        stages: layers of each stage as Megatron's flags set them; None to level them.
    """

    method: Method
    model: Model
    device: Device
    data: int
    tensor: int
    pipeline: int
    micro_batch: int
    global_batch: int
    correction: PassTimes = ONES
    context: int = 1
    expert: int = 1
    recompute: StockRecompute = NONE
    lost: frozenset[str] = frozenset()
    stages: StockLayers | None = None

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration in one pipeline."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def choice(self) -> ScheduleChoice:
        """The schedule's flag."""
        method = self.method
        named = method.chunks if method.is_searched or method.schedule == "interleaved-1f1b" else None
        text = method.schedule if named is None else f"{method.schedule}:{named}"
        return ScheduleChoice(text, method.schedule, named)

    @property
    def placement(self) -> Placement:
        """Rank of each stage."""
        return sequential(1) if self.pipeline == 1 else placement_of(self.choice, self.pipeline)

    @cached_property
    def args(self) -> argparse.Namespace:
        """Megatron's arguments."""
        again, overlaps = self.recompute, self.method.is_stock is False or self._stock_overlaps
        changes: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.global_batch,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "sequence_parallel": self.tensor > 1,
            # Muon shares its state in its own way.
            "use_distributed_optimizer": "muon" not in self.model.args.optimizer,
            "recompute_granularity": again.granularity,
            "recompute_method": again.method,
            "recompute_num_layers": again.layers,
            "recompute_modules": list(again.modules) or None,
        }
        # Megatron refuses its overlap of experts' messages where they are sent again for recompute.
        if again.granularity == "full" or "moe" in again.modules or not overlaps:
            changes[OVERLAP] = False
        return self.model.trained(**changes)

    @property
    def _stock_overlaps(self) -> bool:
        """True if stock may hide experts' messages: it needs several chunks where there is a pipeline."""
        return self.pipeline == 1 or self.method.chunks > 1

    @cached_property
    def spec(self) -> JobSpec:
        """The job, with the device's times of its passes."""
        method = self.method
        fields = model_fields(self.args, self.gpus)
        settings = Settings(self.choice, vocabulary_parallel=method.shared)
        spec = JobSpec(settings, microbatches=self.microbatches, flags=FLAGS, **fields)
        if not method.is_stock:
            spec = without(spec, self.lost)
        spec = timed(spec, self.device, stock=method.is_stock, correction=self.correction)
        if method.may_offload:
            spec = replace(spec, times=self._with_copies(spec))
        if self.pipeline == 1:
            return spec
        if self.stages is not None:
            with suppress(PlanError):  # layers that do not divide over the stages are levelled
                layers = layers_by_stage(self.stages, self.placement.stages)
                return under(replace(spec, layers=self.stages), self.choice, layers=layers)
        return placed(spec, self.choice, saving=MemorySaving(method.may_recompute, method.may_offload))

    def _with_copies(self, spec: JobSpec) -> Costs:
        """Adds the time of copies to the host."""
        trained, costs = spec.trained, spec.times
        assert trained is not None and costs is not None, "the model is known"
        kept = model_memory(trained.build, trained.build.tokens, trained.recompute, shared=self.method.shared)
        return replace(costs, copies=HostCopies(kept.of_rank(self.pipeline) / 2 / self.device.host_link))

    @cached_property
    def costs(self) -> Costs:
        """Costs in seconds, with time and memory of each part of the model."""
        return costs_of(self.spec)

    @property
    def memory(self) -> ModelMemory:
        """Memory of each part of the model."""
        memory = self.costs.in_bytes
        assert memory is not None, "the model is known"
        return memory

    @property
    def trained(self) -> TrainedModel:
        """The model as trained."""
        model = self.spec.trained
        assert model is not None, "the model is known"
        return model

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        if self.pipeline == 1:
            return (len(self.model.whole.shape.layers),)
        layers = self.spec.settings.layers
        assert layers is not None and not isinstance(layers, str), "stages have their layers"
        return layers

    @property
    def wrong(self) -> str:
        """Reason why the setting cannot run; empty if it can."""
        shape, sizes = self.model.whole.shape, sizes_of(self.args)
        if self.global_batch % (self.data * self.micro_batch):
            return "the batch does not divide into microbatches"
        if len(shape.layers) + (0 if self.method.shared else 2) < self.placement.stages:
            return "the layers are too few for the stages"
        if self.method.schedule == "interleaved-1f1b" and self.microbatches % self.pipeline:
            return "the microbatches do not divide by the ranks, as stock's interleaving needs"
        if shape.experts and self.gpus // self.pipeline % (sizes.expert * sizes.expert_tensor):
            return "the GPUs of a stage do not divide by those of its experts"
        return self.wrong_in_stages

    @property
    def wrong_in_stages(self) -> str:
        """Reason why no pipeline of such stages can run; empty if one can."""
        shape, domain = self.model.whole.shape, self.device.domain
        if self.tensor > domain or domain % self.tensor:
            return "GPUs of a node do not divide by the tensor parallel size"
        if shape.heads % self.tensor or (shape.groups or self.tensor) % self.tensor:
            return "heads do not divide by the tensor parallel size"
        if self.context > 1 and shape.sequence % (2 * self.context):
            return "the sequence does not divide by twice the context parallel size"
        if (self.model.args.num_experts or 1) % self.expert:
            return "the experts do not divide by the expert parallel size"
        return ""
