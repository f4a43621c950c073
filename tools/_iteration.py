"""Estimates one setting's iteration: its time, its memory and its model FLOPs utilization (MFU)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.schedules.cli.options import FLAGS
from megatron.schedules.estimate.device_costs import device_costs, optimizer_seconds, reduction_seconds
from megatron.schedules.estimate.device_memory import RankMemory, model_memory, usable
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.model_build import MESSAGES, TrainedModel
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.plans import model_fields
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import MemoryLimit, MemorySaving, ScheduleChoice
from megatron.schedules.planner.request import of_1f1b
from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import even
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement, sequential, zigzag
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.lower_bound import lower_bound
from tools._methods import Method

# The embedding and the output layer count as one layer each.
_STAND_IN = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@dataclass(frozen=True)
class Setting:
    """A method, with parallel and microbatch sizes.

    Args:
        method: the schedule, with or without recompute.
        model, device: the model and the GPU.
        data, tensor, pipeline: parallel sizes.
        micro_batch: samples of a microbatch.
        global_batch: samples of an iteration.
        correction: measured over modelled times of a layer's passes, see :func:`.roofline.corrections`.
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

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return int(self.data * self.tensor * self.pipeline * self.model.args.context_parallel_size)

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration in one pipeline."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def placement(self) -> Placement:
        """Rank of each stage."""
        chunks = self.method.chunks
        return sequential(self.pipeline) if chunks == 1 else zigzag(self.pipeline, chunks)

    @cached_property
    def args(self) -> argparse.Namespace:
        """Megatron's arguments."""
        sizes: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.global_batch,
        }
        ends = dict.fromkeys(_STAND_IN, self.divides and not self.method.shared)
        changes: dict[str, Any] = {"sequence_parallel": self.tensor > 1, "use_distributed_optimizer": True}
        if self.method.recompute:
            changes |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return self.model.trained(**sizes, **ends, **changes)

    @cached_property
    def spec(self) -> JobSpec:
        """The job, with the device's times of its passes."""
        method = self.method
        settings = Settings(
            ScheduleChoice(method.schedule, method.schedule, method.chunks if method.is_searched else None),
            layers=None if self.divides else self.layers,
            saving=MemorySaving(method.may_recompute, method.may_offload),
            vocabulary_parallel=method.shared,
        )
        fields = model_fields(self.args, self.gpus)
        spec = JobSpec(settings, microbatches=self.microbatches, flags=FLAGS, **fields)
        return replace(spec, times=self._times(spec))

    def _times(self, spec: JobSpec) -> Costs:
        """Seconds of the passes, of each part of the model, and of messages and copies."""
        trained = spec.trained
        assert trained is not None, "the model is known"
        costs = device_costs(
            trained,
            Roofline(self.device),
            self.pipeline,
            gpus=self.gpus,
            hides=bool(spec.hides_messages),
            correction=self.correction,
        )
        if not self.method.may_offload:
            return costs
        memory = model_memory(trained.build, trained.build.tokens, trained.recompute, shared=self.method.shared)
        return replace(costs, copies=HostCopies(memory.of_rank(self.pipeline) / 2 / self.device.host_link))

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
    def ends(self) -> tuple[int, int]:
        """Layers that the embedding and the output layer count as."""
        return (0, 0) if self.method.shared else (1, 1)

    @property
    def divides(self) -> bool:
        """True if all stages get as many layers, with the ends."""
        return (len(self.model.whole.shape.layers) + sum(self.ends)) % self.placement.stages == 0

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage: an even partition in which embedding and output layer count as a layer each."""
        return even(len(self.model.whole.shape.layers), self.placement.stages, self.ends)

    @property
    def wrong(self) -> str:
        """Reason why the setting cannot run; empty if it can."""
        shape, sizes = self.model.whole.shape, sizes_of(self.args)
        if self.global_batch % (self.data * self.micro_batch):
            return "the batch does not divide into microbatches"
        if len(shape.layers) + sum(self.ends) < self.placement.stages:
            return "the layers are too few for the stages"
        if self.tensor > self.device.domain or self.device.domain % self.tensor:
            return "GPUs of a node do not divide by the tensor parallel size"
        if shape.heads % self.tensor or (shape.groups or self.tensor) % self.tensor:
            return "heads do not divide by the tensor parallel size"
        if shape.experts and self.gpus // self.pipeline % (sizes.expert * sizes.expert_tensor):
            return "the GPUs of a stage do not divide by those of its experts"
        return ""

    @property
    def flags(self) -> str:
        """Flags for ``pretrain_gpt.py``, after the model's own."""
        length = self.model.sequence
        flags = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--pipeline-model-parallel-size {self.pipeline}",
            f"--seq-length {length} --max-position-embeddings {self.model.args.max_position_embeddings or length}",
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.global_batch}",
            "--use-distributed-optimizer",
        ]
        if self.tensor > 1:
            flags.append("--sequence-parallel")
        if self.method.recompute:
            flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        return " ".join([*flags, *self._of_schedule()])

    def _of_schedule(self) -> Iterator[str]:
        """Yields the flags of this package."""
        adaptive, offload = self.method.is_searched, self.method.may_offload
        chunks = f":{self.method.chunks}" if adaptive else ""
        yield f"--pipeline-schedule {self.method.schedule}{chunks}"
        if self.method.shared:
            yield "--pipeline-vocabulary-parallel"
        if not self.divides:
            yield f"--pipeline-layers {','.join(map(str, self.layers))}"
        elif not self.method.shared:
            yield " ".join(f"--{name.replace('_', '-')}" for name in _STAND_IN)
        if adaptive:
            yield f"--pipeline-memory-limit {memory_limit(self):.3f}"
        if self.method.saves_memory:
            rate = f"={self.device.host_link / 1e9:g}" if offload else ""
            how = "recompute" if not offload else "both" if self.method.may_recompute else "offload"
            yield f"--pipeline-save-memory {how}{rate}"
        if self.method.schedule != "1f1b":  # other orders depend on them
            times = *self.costs.layers.passes, self.costs.link.latency
            yield f"--pipeline-costs {','.join(f'{1e3 * time:.5g}' for time in times)}"


@dataclass(frozen=True)
class Estimate:
    """Figures of one setting.

    Args:
        setting: the setting.
        seconds: iteration time.
        mfu: share of the GPUs' peak arithmetic that the model uses, without recompute.
        bubble: share of the pipeline's time in which an average rank is idle.
        ranks: memory of each pipeline rank.
        share: peak activation memory as a fraction of 1F1B's, as in a memory limit.
        recomputed: share of the computing time that is recompute passes (R).
        messages: shares of the pipeline's time in which messages of an average rank's experts are hidden, and exposed.
    """

    setting: Setting
    seconds: float
    mfu: float
    bubble: float
    ranks: tuple[RankMemory, ...]
    share: float
    recomputed: float = 0.0
    messages: tuple[float, float] = (0.0, 0.0)

    @property
    def memory(self) -> float:
        """Bytes on the GPU with the most memory in use."""
        return max(rank.device for rank in self.ranks)

    @property
    def activations(self) -> float:
        """Bytes of activations on the rank with the most."""
        return max(rank.activations for rank in self.ranks)

    @property
    def host(self) -> float:
        """Upper bound of the bytes on a node's host: every GPU counts as much as the one with the most."""
        return self.setting.device.node * max(rank.host for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """True if the setting fits the memory of the device and of the host."""
        device = self.setting.device
        return self.memory <= usable(device.memory) and self.host <= device.host_memory


def estimate(setting: Setting, search_seconds: float | None = None) -> Estimate:
    """Plans the setting's job and computes its figures.

    Raises:
        PlanError: if there is no plan, such as for a lack of memory.
    """
    return figures(setting, planned(setting, search_seconds))


def planned(setting: Setting, search_seconds: float | None = None) -> JobPlan:
    """Plans the setting's job. Raises as :func:`estimate`."""
    spec = setting.spec
    if setting.method.is_searched:
        fraction = memory_limit(setting)
        limit = MemoryLimit(f"{fraction:.3f}", fraction=fraction)
        spec = replace(spec, settings=replace(spec.settings, memory_limit=limit, search_seconds=search_seconds))
    return plan_job(spec)


def seconds_of(setting: Setting, job: JobPlan) -> float:
    """Iteration time of the setting's planned job."""
    return job.plan.iteration_time + after_the_pipeline(setting)


def figures(setting: Setting, job: JobPlan) -> Estimate:
    """Computes the figures of the setting's planned job."""
    seconds, plan = seconds_of(setting, job), job.plan
    return Estimate(
        setting,
        seconds,
        mfu(setting, seconds),
        plan.bubble,
        job.memory,
        plan.peak_memory,
        plan.timeline.recomputed,
        plan.timeline.messages,
    )


def least_seconds(setting: Setting) -> float:
    """Lower bound of the iteration time in seconds, within the device's memory; infinite if nothing fits."""
    if least_memory(setting)[1].device > usable(setting.device.memory):
        return math.inf
    cheapest = _choices(setting)[-1]
    room = _room(setting) * setting.pipeline
    return lower_bound(setting.placement, setting.microbatches, cheapest, room) + after_the_pipeline(setting)


def least_memory(setting: Setting) -> tuple[int, RankMemory]:
    """Returns the pipeline rank with the most memory for a single microbatch, and that memory.

    No schedule needs less.
    """
    unit, placement = setting.memory.of_rank(setting.pipeline), setting.placement
    choices = [costs.least_by_rank(placement) for costs in _choices(setting)]
    least = [unit * min(of_rank) for of_rank in zip(*choices, strict=True)]
    ranks = [rank._replace(activations=held) for rank, held in zip(_static(setting), least, strict=True)]
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].device)
    return worst, ranks[worst]


def mfu(setting: Setting, seconds: float) -> float:
    """Returns the model's arithmetic in an iteration over the GPUs' peak, in FP8 or FP4 if it has them."""
    work = setting.model.flops_a_token * setting.model.sequence * setting.global_batch
    return work / (seconds * setting.gpus * setting.device.peak(setting.model.whole.quantized))


def memory_limit(setting: Setting) -> float:
    """Returns the memory limit of an adaptive plan, a fraction of 1F1B's.

    It is the method's limit, or the memory left on the device, at most 2.
    """
    if setting.method.memory_limit is not None:
        return setting.method.memory_limit
    return min(2.0, _room(setting, MESSAGES))


def after_the_pipeline(setting: Setting) -> float:
    """Seconds of the gradients' reduce-scatter, the optimizer step and the parameters' all-gather, without overlap."""
    roofline = Roofline(setting.device)
    most = max(_sizes(setting), key=lambda count: count.all)
    same_node = setting.data * setting.tensor <= setting.device.domain
    return optimizer_seconds(setting.trained, roofline, most, setting.data) + reduction_seconds(
        setting.trained, roofline, most, setting.data, same_node=same_node
    )


def _choices(setting: Setting) -> list[StageCosts]:
    """Returns the costs without memory saving, with full recompute and with full offload, if allowed."""
    costs, placement = setting.costs, setting.placement
    every = (1.0,) * placement.stages
    choices = [costs.on(placement)]
    choices += [costs.on(placement, Decisions(recomputed=every))] if setting.method.may_recompute else []
    # Copies that take no time save the same memory.
    free = replace(costs, copies=HostCopies())
    choices += [free.on(placement, Decisions(offloaded=every))] if setting.method.may_offload else []
    return choices


def _static(setting: Setting, messages: int = 0) -> list[RankMemory]:
    """Memory of each pipeline rank without activations."""
    numbers, waiting = setting.trained.numbers, messages * setting.trained.message_bytes
    return [RankMemory.static_of(count, numbers, waiting) for count in _sizes(setting)]


def _room(setting: Setting, messages: int = 0) -> float:
    """Memory left for activations, as a fraction of 1F1B's; negative where there is none."""
    held = max(rank.device for rank in _static(setting, messages))
    left = usable(setting.device.memory) - held - setting.memory.most_passing
    return of_1f1b(left, setting.pipeline, setting.memory.of_rank(setting.pipeline))


def _sizes(setting: Setting) -> list[Count]:
    """Parameters of one GPU of each pipeline rank."""
    return parameters(setting.trained.build).by_stage(setting.layers, setting.placement.rank_of, setting.method.shared)
