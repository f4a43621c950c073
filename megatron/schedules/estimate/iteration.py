"""One setting's iteration: its time, its memory and what share of the GPUs' arithmetic it uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.schedules.estimate.hardware import GIB, Device, Model
from megatron.schedules.estimate.roofline import (
    ONES,
    Microbatch,
    PassTimes,
    SlotTimes,
    collective_seconds,
    p2p_seconds,
    slot_times,
    stream_seconds,
)
from megatron.schedules.planner.memory_saving import relieve
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part, even
from megatron.schedules.schedule.placement import Placement, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.lower_bound import lower_bound

# The CUDA context, NCCL's buffers and messages on their way, cuBLAS's workspace, what the allocator cannot use: an
# assumption.
RESERVED = 4 * GIB
# Of a linear layer's 34 bytes a token and unit of width, inputs (14) and outputs' gradients (18) wait for W.
_WAITS_FOR_WEIGHTS = 32 / 34
Planned = Callable[[Request], Schedule]


class Method(NamedTuple):
    """A way to train, as the paper names it.

    Args:
        name: in tables.
        schedule: by our name.
        chunks: stages a rank holds.
        recompute: whether layers keep their inputs only, and run their forward again.
        memory_limit: for ``adaptive``, of 1F1B's activation memory; None: as much as there is room for.
        shared: whether all pipeline ranks share the vocabulary, which then is no slot of layers' size.
        again, offload: for ``adaptive``, whether the plan may do forwards again or copy activations to the host.
    """

    name: str
    schedule: str
    chunks: int
    recompute: bool = False
    memory_limit: float | None = None
    shared: bool = False
    again: bool = False
    offload: bool = False

    @property
    def relieves(self) -> bool:
        """Whether the plan chooses layers to do again or to offload."""
        return self.again or self.offload

    def sharing(self) -> Method:
        """The same, the vocabulary shared."""
        return self._replace(name=f"{self.name}, shared", shared=True)


METHODS = (
    Method("1F1B", "1f1b", 1),
    Method("1F1B-R", "1f1b", 1, recompute=True),
    Method("ZB-1P", "zb-1p", 1),
    Method("V-Min", "v-min", 2),
    Method("V-Half", "v-half", 2),
    Method("V-ZB", "v-zb", 2),
)
ADAPTIVE = Method("adaptive", "adaptive", 2)
RELIEVED = (
    ADAPTIVE._replace(name="adaptive with recompute", again=True),
    ADAPTIVE._replace(name="adaptive with offload", offload=True),
    ADAPTIVE._replace(name="adaptive with both", again=True, offload=True),
)


@dataclass(frozen=True)
class Setting:
    """A method and how the GPUs are shared out.

    Args:
        method: the schedule, and whether activations are recomputed.
        model, device: what is trained, on what.
        data, tensor, pipeline: parallel sizes; their product is the number of GPUs.
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
        """How many it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def microbatches(self) -> int:
        """n, of an iteration on one pipeline."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def microbatch(self) -> Microbatch:
        """What one GPU does with a microbatch."""
        return Microbatch(self.model, self.tensor, self.micro_batch)

    @property
    def placement(self) -> Placement:
        """Where the stages live."""
        chunks = self.method.chunks
        return sequential(self.pipeline) if chunks == 1 else zigzag(self.pipeline, chunks)

    @property
    def wrong(self) -> str:
        """Why there is no such run; empty where there is."""
        if self.global_batch % (self.data * self.micro_batch):
            return "the batch does not divide into microbatches"
        if not self.method.shared and self.model.slots % (self.pipeline * self.method.chunks):
            return "the layers do not spread over the stages"
        if self.tensor > self.device.node or self.device.node % self.tensor or self.model.heads % self.tensor:
            return "heads or GPUs of a node do not divide by the tensor parallel size"
        return ""

    @property
    def flags(self) -> str:
        """What sets it in ``pretrain_gpt.py``, beside the model's own flags."""
        flags = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--pipeline-model-parallel-size {self.pipeline}",
            f"--seq-length {self.model.sequence} --max-position-embeddings {self.model.sequence}",
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.global_batch}",
            "--pipeline-vocabulary-parallel --pipeline-layers auto"
            if self.method.shared
            else "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "--use-distributed-optimizer",
            f"--pipeline-schedule {self.method.schedule}",
        ]
        if self.tensor > 1:
            flags.append("--sequence-parallel")
        if self.method.recompute:
            flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        if self.method.schedule == "adaptive":
            flags.append(f"--pipeline-memory-limit {memory_limit(self):.3f}")
        if self.method.relieves:
            copies = f"{'both' if self.method.again else 'offload'}={self.device.host_link / 1e9:g}"
            flags.append(f"--pipeline-save-memory {copies if self.method.offload else 'recompute'}")
        if self.method.offload:
            found = costs(self)
            times = found.forward, found.input_grad, found.weight_grad, found.comm
            flags.append(f"--pipeline-costs {','.join(f'{1e3 * time:.4g}' for time in times)}")
        return " ".join(flags)


@dataclass(frozen=True)
class Estimate:
    """What a setting comes to.

    Args:
        setting: the setting.
        seconds: of an iteration.
        mfu: share of the GPUs' arithmetic that the model's own takes; what is recomputed does not count.
        bubble: share of the pipeline's time in which an average rank idles.
        memory: bytes on the GPU that needs most.
        activations: those of them that are activations, on the rank that holds most of these.
        share: the same as a fraction of d microbatches' worth of an average rank, what a memory limit is given in.
        recomputed: share of the computing that does forwards again, in passes of its own.
        host: bytes on the host of a node at most, as if all of its GPUs held as much as the one that holds most there.
    """

    setting: Setting
    seconds: float
    mfu: float
    bubble: float
    memory: float
    activations: float
    share: float
    recomputed: float = 0.0
    host: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it runs in the device's memory, and in the host's."""
        device = self.setting.device
        return self.memory <= device.memory and self.host <= device.host_memory


def estimate(setting: Setting, planned: Planned = plan, search_seconds: float | None = None) -> Estimate:
    """Plan the setting's schedule under its costs and read off what it comes to.

    Raises:
        PlanError: where there is no such plan, such as an adaptive one in less memory than anything runs in.
    """
    request = request_for(setting, search_seconds)
    if setting.method.relieves:
        request = relieve(request)
    return _read_off(setting, simulate(planned(request), request.costs_on(setting.placement)))


def request_for(setting: Setting, search_seconds: float | None = None) -> Request:
    """The plan that a setting asks for."""
    request = Request(setting.method.schedule, setting.pipeline, setting.microbatches, costs(setting))
    if setting.method.schedule != "adaptive":
        return request
    return replace(
        request,
        memory_limit=memory_limit(setting),
        chunk_choices=(setting.method.chunks,),
        search_seconds=search_seconds,
        recompute=setting.method.again,
        offload=setting.method.offload,
    )


def costs(setting: Setting) -> Costs:
    """Seconds of half a rank's slots, and what single slots take and hold against the average.

    Where the vocabulary is shared, or layers are chosen to be done again or offloaded: of half a rank's layers, and
    what the ends cost against them.
    """
    times, held, layers = _times(setting), _held_by_slot(setting), setting.model.layers
    slots = [times.embedding, *[times.layer] * layers, times.output_layer]
    spread = slots[1:-1] if _by_layers(setting) else slots
    mean = PassTimes(*(sum(each) / len(spread) for each in zip(*spread, strict=True)))
    half, average = len(spread) / (2 * setting.pipeline), sum(held) / len(held)
    found = Costs(
        forward=half * mean.forward,
        input_grad=half * mean.input_grad,
        weight_grad=half * mean.weight_grad,
        comm=_latency(setting),
        weight_share=_left_to_w(setting),
        stock_recompute=1.0 if setting.method.recompute else 0.0,
        kept=_kept(setting),
    )
    if not _by_layers(setting):
        return replace(
            found,
            stage_weights=tuple(slot.whole / mean.whole for slot in slots),
            stage_activations=tuple(each / average for each in held),
        )
    model = ModelLoads(
        Part(whole=Load(*times.embedding, held[0])),
        (Part(split=Load(*times.layer, held[1])),) * layers,
        Part(whole=Load(*times.output_layer, held[-1])),
        stand_in=(0, 0) if setting.method.shared else (1, 1),
        kept_for_output=_kept_for_output(setting),
    )
    return replace(
        found,
        model=model,
        shared_vocabulary=setting.method.shared,
        layer_input=_layer_input(setting),
        copy=_rank_activations(setting) / 2 / setting.device.host_link if setting.method.offload else 0.0,
    )


def least_seconds(setting: Setting) -> float:
    """No schedule of this setting that fits in the device's memory takes less; infinite where none fits."""
    found, placement = costs(setting), setting.placement
    room, every = _room(setting) * setting.pipeline, (1.0,) * placement.stages
    on_stages = [found.on(placement)]
    on_stages += [found.on(placement, Decisions(recomputed=every))] if setting.method.again else []
    # What is offloaded spares no less where copies take no time, nor does what is recomputed.
    free = replace(found, copy=0.0)
    on_stages += [free.on(placement, Decisions(offloaded=every))] if setting.method.offload else []
    if all(room < each.least(placement) for each in on_stages):
        return math.inf
    return lower_bound(placement, setting.microbatches, on_stages[-1], room) + after_the_pipeline(setting)


def mfu(setting: Setting, seconds: float) -> float:
    """The model's arithmetic of an iteration over what the GPUs could do in ``seconds``."""
    work = setting.model.flops_a_token * setting.model.sequence * setting.global_batch
    return work / (seconds * setting.gpus * setting.device.matrix_flops)


def memory_limit(setting: Setting) -> float:
    """What an adaptive plan may hold, as a fraction of 1F1B's: asked for, or what the device has left, up to twice."""
    if setting.method.memory_limit is not None:
        return setting.method.memory_limit
    return min(2.0, _room(setting))


def static_bytes(setting: Setting) -> list[float]:
    """What each pipeline rank holds all the time: parameters, gradients, optimizer, and what is reserved.

    Two bytes a parameter in bf16, four of its gradient, and twelve of the optimizer (a copy and two moments in single
    precision), these shared by data-parallel ranks: Megatron's distributed optimizer.
    """
    return [RESERVED + count * (2 + 4 + 12 / setting.data) for count in _parameters(setting)]


def after_the_pipeline(setting: Setting) -> float:
    """Seconds of gradients' reduce-scatter, the optimizer's step and parameters' all-gather, none of it overlapped."""
    most, same_node = max(_parameters(setting)), setting.data * setting.tensor <= setting.device.node
    seconds = stream_seconds(most * (4 + 12 + 12 + 2) / setting.data, setting.device)
    if setting.data > 1:
        seconds += collective_seconds((4 + 2) * most, setting.data, setting.device, same_node=same_node)
    return seconds


def _read_off(setting: Setting, timeline: Timeline) -> Estimate:
    seconds = timeline.makespan + after_the_pipeline(setting)
    # Where layers are recomputed, one of them is there as a whole while its backward runs.
    whole = _held_by_slot(setting)[1] if setting.method.recompute else 0.0
    rank = _rank_activations(setting)
    held = [peak * rank + whole for peak in timeline.peaks]
    memory = max(static + bytes_held for static, bytes_held in zip(static_bytes(setting), held, strict=True))
    share = timeline.peak / setting.pipeline
    return Estimate(
        setting,
        seconds,
        mfu(setting, seconds),
        timeline.bubble,
        memory,
        max(held),
        share,
        timeline.recomputed,
        setting.device.node * rank * max(taken(timeline.schedule, timeline.costs)),
    )


def _room(setting: Setting) -> float:
    """What weights and optimizer leave to activations, as a fraction of 1F1B's; negative where they do not fit."""
    left = setting.device.memory - max(static_bytes(setting))
    return left / _rank_activations(setting) / setting.pipeline


def _times(setting: Setting) -> SlotTimes:
    return slot_times(setting.microbatch, setting.device, setting.correction)


def _latency(setting: Setting) -> float:
    """All messages are taken to cross nodes where any does."""
    return p2p_seconds(setting.microbatch, setting.device, same_node=setting.gpus <= setting.device.node)


def _held_by_slot(setting: Setting) -> list[float]:
    """Bytes a microbatch leaves in each slot; the embedding's dropout keeps its mask and its output goes on."""
    model, tokens = setting.model, setting.microbatch.tokens / setting.tensor
    ends = 3.0 * model.hidden * tokens, model.output_layer.held * tokens
    return [ends[0], *[model.layer.whole.held * tokens] * model.layers, ends[1]]


def _kept_for_output(setting: Setting) -> tuple[float, float]:
    """Bytes that S leaves to T: hidden states on each rank, and of all words together what the loss says of them."""
    model, tokens = setting.model, setting.microbatch.tokens / setting.tensor
    return 2.0 * model.hidden * tokens, 2.0 * model.vocabulary * tokens


def _left_to_w(setting: Setting) -> float:
    """Of a layer's activations, the part that waits from I to W; a whole backward leaves nothing."""
    return _kept(setting) if setting.method.schedule == "1f1b" else _WAITS_FOR_WEIGHTS


def _kept(setting: Setting) -> float:
    """The part of a layer's activations that is there from F to I: all, or two bytes a token and unit of its input."""
    return _layer_input(setting) if setting.method.recompute else 1.0


def _layer_input(setting: Setting) -> float:
    return 2 * setting.model.hidden / setting.model.layer.whole.held


def _by_layers(setting: Setting) -> bool:
    """Whether costs are those of decoder layers, the ends on top, and not of slots that are all alike."""
    return setting.method.shared or setting.method.relieves


def _rank_activations(setting: Setting) -> float:
    held = _held_by_slot(setting)
    return sum(held[1:-1] if _by_layers(setting) else held) / setting.pipeline


def _parameters(setting: Setting) -> list[float]:
    """Of one GPU of each pipeline rank."""
    model, placement = setting.model, setting.placement
    ends = float(model.vocabulary * model.hidden)
    if setting.method.shared:
        counts = even(model.layers, placement.stages)
        layers = [sum(counts[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
        both = 2 * ends / placement.ranks
        return [(count * model.layer_parameters + both) / setting.tensor for count in layers]
    slots = [ends, *[float(model.layer_parameters)] * model.layers, ends]
    each = len(slots) // placement.stages
    of_stage = [sum(slots[stage * each : (stage + 1) * each]) / setting.tensor for stage in range(placement.stages)]
    return [sum(of_stage[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
