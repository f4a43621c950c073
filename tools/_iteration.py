"""Estimates one setting's iteration: its time, its memory and its model FLOPs utilization (MFU)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron.schedules.cli.options import FLAGS
from megatron.schedules.estimate.device_costs import optimizer_seconds, reduction_seconds
from megatron.schedules.estimate.device_memory import RankMemory, memory, model_memory, usable
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.model_build import MESSAGES, StockRecompute, TrainedModel, rank_memory
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.plans import model_fields
from megatron.schedules.job.spec import JobSpec, Settings, StockLayers
from megatron.schedules.job.stage_layers import layers_by_stage
from megatron.schedules.job.values import MemoryLimit, MemorySaving, ScheduleChoice
from megatron.schedules.planner.request import of_1f1b
from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement, sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError
from tools._job_specs import OVERLAP, placed, placement_of, timed, under, without
from tools._methods import Method

NONE = StockRecompute()
# Microbatches of each rank with which a schedule is in its steady state, and with which its period is measured.
_STEADY, _LONGER = 2, 3


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
        # Megatron refuses its overlap of experts' messages with full recompute.
        if again.granularity == "full" or not overlaps:
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


class Outcome(NamedTuple):
    """What a plan gives.

    Args:
        seconds: time of the pipeline.
        bubble: share of it in which an average rank is idle.
        ranks: memory of each pipeline rank.
        share: peak activation memory as a fraction of 1F1B's.
        recomputed: share of the computing time that is recompute passes (R).
        messages: shares of the time in which messages of experts are hidden, and exposed.
        layers: decoder layers of each stage.
    """

    seconds: float
    bubble: float
    ranks: tuple[RankMemory, ...]
    share: float
    recomputed: float
    messages: tuple[float, float]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """Figures of one setting.

    Args:
        setting: the setting.
        seconds: iteration time.
        mfu: share of the GPUs' peak arithmetic that the model uses, without recompute.
        outcome: what its plan gives.
    """

    setting: Setting
    seconds: float
    mfu: float
    outcome: Outcome

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which an average rank is idle."""
        return self.outcome.bubble

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        """Memory of each pipeline rank."""
        return self.outcome.ranks

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
    return figures(setting, planned(setting, setting.microbatches, search_seconds))


def quick_estimate(setting: Setting, search_seconds: float | None = None) -> Estimate:
    """Computes the figures from plans with few microbatches.

    Once a schedule is in its steady state, each further microbatch takes the same time. A searched schedule has no such
    state: further microbatches are assumed to keep the busiest rank busy.

    Raises:
        PlanError: as :func:`estimate`.
    """
    ranks, rest = setting.pipeline, setting.microbatches % setting.pipeline
    few, more = _STEADY * ranks + rest, _LONGER * ranks + rest
    if ranks == 1 or setting.microbatches <= more:
        return estimate(setting, search_seconds)
    longer = planned(setting, more, search_seconds, messages=0)
    busy = longer.seconds * (1 - longer.bubble) / more
    if setting.method.is_searched:
        each = busy / (1 - longer.bubble / _LONGER)
    else:
        each = (longer.seconds - planned(setting, few, messages=0).seconds) / ranks
    seconds = longer.seconds + (setting.microbatches - more) * each
    bubble = 1 - busy * setting.microbatches / seconds
    return figures(setting, longer._replace(seconds=seconds, bubble=bubble))


def planned(
    setting: Setting, microbatches: int, search_seconds: float | None = None, messages: int | None = None
) -> Outcome:
    """Plans the setting's job for so many microbatches. Raises as :func:`estimate`.

    Args:
        setting: the setting.
        microbatches: microbatches of an iteration.
        search_seconds: time of a search on a typical core.
        messages: messages that each rank holds; None for as many as it does, which takes as long to find out as a plan.
    """
    if setting.pipeline == 1:
        return _alone(setting, microbatches)
    spec = replace(setting.spec, microbatches=microbatches)
    if setting.method.is_searched:
        fraction = memory_limit(setting)
        limit = MemoryLimit(f"{fraction:.3f}", fraction=fraction)
        spec = replace(spec, settings=replace(spec.settings, memory_limit=limit, search_seconds=search_seconds))
    return _outcome(plan_job(spec), messages)


def _outcome(job: JobPlan, messages: int | None) -> Outcome:
    plan, model = job.plan, job.spec.trained
    assert model is not None, "the model is known"
    timeline = plan.timeline
    if messages is None:
        held = job.memory
    else:
        of_ranks = [messages] * plan.schedule.ranks
        held = rank_memory(model, plan.schedule, plan.costs, job.request.costs, job.layers, of_ranks)
    return Outcome(
        plan.iteration_time,
        plan.bubble,
        held,
        plan.peak_memory,
        timeline.recomputed,
        timeline.messages,
        job.layers,
    )


def _alone(setting: Setting, microbatches: int) -> Outcome:
    """Returns what one rank does without a pipeline: microbatches one after another."""
    where = sequential(1)
    order = tuple(Pass(0, kind, 0) for kind in (Kind.F, Kind.B))
    one = Schedule("", where, 1, (order,))
    on_stages = setting.costs.on(where, Decisions(layers=setting.layers))
    held = memory(one, on_stages, setting.memory.of_rank(1), _sizes(setting), setting.trained.numbers, (0.0,))
    timeline = simulate(one, on_stages)
    return Outcome(microbatches * timeline.makespan, 0.0, held, timeline.peak, 0.0, (0.0, 0.0), setting.layers)


def figures(setting: Setting, outcome: Outcome) -> Estimate:
    """Computes the figures of the setting's planned job."""
    seconds = outcome.seconds + after_the_pipeline(setting)
    return Estimate(setting, seconds, mfu(setting, seconds), outcome)


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
    """Seconds of the optimizer step, and of the messages of gradients and parameters that nothing hides."""
    most = max(_sizes(setting), key=lambda count: count.all)
    layers = setting.costs.layers
    return after(setting, setting.trained, most, 2 * (layers.forward + layers.input_grad + layers.weight_grad))


def after(setting: Setting, trained: TrainedModel, most: Count, microbatch: float) -> float:
    """Seconds after the pipeline.

    Under ``--overlap-grad-reduce`` one microbatch hides messages: gradients are reduced behind the last backwards, and
    parameters gathered behind the first forwards.

    Args:
        setting: the setting.
        trained: its model as trained.
        most: parameters of the rank with the most.
        microbatch: seconds in which an average rank computes one microbatch.
    """
    roofline, ranks = Roofline(setting.device), setting.data * setting.context
    waits = reduction_seconds(trained, roofline, most, same_node=ranks * setting.tensor <= setting.device.domain)
    if getattr(setting.model.args, "overlap_grad_reduce", False):
        waits = max(0.0, waits - microbatch)
    return optimizer_seconds(trained, roofline, most, ranks) + waits


def _choices(setting: Setting) -> list[StageCosts]:
    """Returns the costs without memory saving, with full recompute and with full offload, if allowed."""
    costs, placement = setting.costs, setting.placement
    every, layers = (1.0,) * placement.stages, setting.layers
    choices = [costs.on(placement, Decisions(layers))]
    choices += [costs.on(placement, Decisions(layers, recomputed=every))] if setting.method.may_recompute else []
    # Copies that take no time save the same memory.
    free = replace(costs, copies=HostCopies())
    choices += [free.on(placement, Decisions(layers, offloaded=every))] if setting.method.may_offload else []
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


def _sizes(setting: Setting) -> Sequence[Count]:
    """Parameters of one GPU of each pipeline rank."""
    known = parameters(setting.trained.build)
    return known.by_stage(setting.layers, setting.placement.rank_of, setting.method.shared)
