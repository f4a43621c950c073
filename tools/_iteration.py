"""Estimates one setting's iteration: its time, its memory and its model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from megatron.schedules.estimate.device_costs import optimizer_seconds, reduction_seconds
from megatron.schedules.estimate.device_memory import RankMemory, memory, usable
from megatron.schedules.estimate.model_build import MESSAGES, TrainedModel, rank_memory
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.request import of_1f1b
from megatron.schedules.programs.lowering import lower
from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from tools._setting import Setting

# Microbatches of each rank in the shorter of two plans that show the steady state: for a quick estimate, and the fewest
# for any other.
_QUICK, _FEWEST = 2, 3
# Messages that ranks hold at least, and ranks of a long pipeline for each one more.
_FEW_MESSAGES, _RANKS_A_MESSAGE = 5, 5
# Stages x microbatches of larger plans take the fewest rounds of polishing (search/polish.py): a plan with more
# microbatches than that is the same one, and longer.
_ENOUGH = 17_000


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
        each: time of a microbatch in the steady state, seconds.
    """

    seconds: float
    bubble: float
    ranks: tuple[RankMemory, ...]
    share: float
    recomputed: float
    messages: tuple[float, float]
    layers: tuple[int, ...]
    each: float


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

    Of a plan that would take long, further microbatches are not planned: each takes the same time (less than 0.1 % off;
    1 % if the order is searched).

    Raises:
        PlanError: if there is no plan, such as for a lack of memory.
    """
    ranks, stages = setting.pipeline, setting.placement.stages
    steady = max(_FEWEST, ceil(_ENOUGH / (stages * ranks)))
    return _of_some_microbatches(setting, steady, search_seconds)


def quick_estimate(setting: Setting, search_seconds: float | None = None) -> Estimate:
    """Computes the figures from plans with few microbatches, with about the least number of messages that they hold.

    Raises:
        PlanError: as :func:`estimate`.
    """
    return _of_some_microbatches(setting, _QUICK, search_seconds, is_quick=True)


def _of_some_microbatches(
    setting: Setting, steady: int, search_seconds: float | None, *, is_quick: bool = False
) -> Estimate:
    """Computes the figures from plans with ``steady`` microbatches of each rank, and with one more.

    Once a schedule is in its steady state, each further microbatch takes the same time. Searches for two numbers of
    microbatches find different orders, so there that time is read from the middle of the longer plan; also where that
    one does not fit.
    """
    ranks, rest = setting.pipeline, setting.microbatches % setting.pipeline
    messages = max(_FEW_MESSAGES, ranks // _RANKS_A_MESSAGE) if is_quick else None
    few, more = steady * ranks + rest, (steady + 1) * ranks + rest
    if ranks == 1 or setting.microbatches <= more:
        return figures(setting, planned(setting, setting.microbatches, search_seconds, messages))
    longer = planned(setting, more, search_seconds, messages)
    busy = longer.seconds * (1 - longer.bubble) / more
    each = longer.each
    if setting.method.is_searched:
        if is_quick and memory_limit(setting) >= 1:
            # So much memory is full only after most of the plan, and then ranks are hardly idle.
            each = min(each, busy / (1 - longer.bubble / (steady + 1)))
    elif figures(setting, longer).fits:  # the time of another one is not worth a second plan
        each = (longer.seconds - planned(setting, few, messages=0).seconds) / ranks
    seconds = longer.seconds + (setting.microbatches - more) * each
    return figures(setting, longer._replace(seconds=seconds, bubble=1 - busy * setting.microbatches / seconds))


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
    if messages is None:  # a job proves its programs, which takes as long again
        of_ranks = [program.messages_held for program in lower(plan.schedule, plan.costs)]
    else:
        of_ranks = [messages] * plan.schedule.ranks
    return Outcome(
        plan.iteration_time,
        plan.bubble,
        rank_memory(model, plan.schedule, plan.costs, job.request.costs, job.layers, of_ranks),
        plan.peak_memory,
        timeline.recomputed,
        timeline.messages,
        job.layers,
        _each(timeline),
    )


def _each(timeline: Timeline) -> float:
    """Returns the seconds of a microbatch in the steady state: in the middle third of an average rank's passes."""
    rates = []
    for ends in timeline.end:
        third = len(ends) // 3
        passes = len(ends) / timeline.schedule.microbatches
        rates.append((ends[2 * third] - ends[third]) * passes / third if third else 0.0)
    return sum(rates) / len(rates)


def _alone(setting: Setting, microbatches: int) -> Outcome:
    """Returns what one rank does without a pipeline: microbatches one after another."""
    where = sequential(1)
    order = tuple(Pass(0, kind, 0) for kind in (Kind.F, Kind.B))
    one = Schedule("", where, 1, (order,))
    on_stages = setting.costs.on(where, Decisions(layers=setting.layers))
    held = memory(one, on_stages, setting.memory.of_rank(1), _sizes(setting), setting.trained.numbers, (0.0,))
    timeline = simulate(one, on_stages)
    return Outcome(
        microbatches * timeline.makespan, 0.0, held, timeline.peak, 0.0, (0.0, 0.0), setting.layers, timeline.makespan
    )


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
