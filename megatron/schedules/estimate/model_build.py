"""Models as Megatron builds and trains them: bytes of each parameter, recompute, and costs for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import Numbers, RankMemory, Recompute, memory, model_memory
from megatron.schedules.estimate.measured_layers import spread_loads, spread_memory
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import between
from megatron.schedules.estimate.symbols import share, typical_layers, works
from megatron.schedules.estimate.times import ANY, Prices, loads, message_shares
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.graph_slots import slot_counts
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

# Most plans hold no more messages on a rank at once; the number is known once a plan is lowered.
MESSAGES = 8


@dataclass(frozen=True)
class StockRecompute:
    """Megatron's own recompute, as its four flags."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()

    @property
    def kept(self) -> Recompute:
        """The same for memory estimates."""
        if self.granularity == "full":
            layers = self.layers or 1
            return Recompute(layers=None, together=layers) if self.method == "uniform" else Recompute(layers=layers)
        return Recompute(modules=self.modules or ("core_attn",)) if self.granularity == "selective" else Recompute()


@dataclass(frozen=True)
class TrainedModel:
    """A model as a job trains it.

    Args:
        build: how Megatron builds it.
        numbers: bytes of each parameter.
        recompute: Megatron's own recompute.
        stand_in: true if the embedding and the output layer count as a layer each in an even partition.
        ends: number of layers of the first and of the last stage; None: as many as the other stages have.
    """

    build: Build
    numbers: Numbers
    recompute: Recompute
    stand_in: tuple[bool, bool] = (False, False)
    ends: tuple[int | None, int | None] = (None, None)

    @property
    def message_bytes(self) -> float:
        """Bytes of one microbatch's hidden states on one rank, in all residual streams."""
        build = self.build
        return build.tokens * build.streams * build.shape.hidden * build.number / between(build)

    @property
    def graph_mask_bytes(self) -> float:
        """Bytes of the attention mask that graphs of layers read, on one rank."""
        build = self.build
        has_attention = build.graphs is not None and (not build.graphs or "attn" in build.graphs)
        return build.tokens * build.shape.sequence if has_attention else 0.0


def with_model(
    costs: Costs,
    model: TrainedModel,
    *,
    shared: bool,
    placed: bool = False,
    profile: JobProfile | None = None,
    hides: bool = False,
) -> Costs:
    """Adds time and memory of each part of ``model``, with Megatron's recompute, to ``costs``.

    Args:
        costs: times; a ``model`` in them is kept.
        model: the model as trained.
        shared: true under vocabulary parallelism.
        placed: true if the planner reserves memory for parameters, because it partitions the layers or keeps within a
            device.
        profile: measured profile of the model, if there is one.
        hides: true if weight gradients may run behind messages of experts. Their time is computed from the model's
            arithmetic if neither ``costs`` nor a profile has it.
    """
    build, (first, last) = model.build, model.stand_in
    numbers = model.numbers if placed else None
    kept = model_memory(build, build.tokens, model.recompute, shared=shared, numbers=numbers)
    estimated, known = kept, loads(build)
    if profile is not None:
        kept = profile.memory(kept)
    if not costs.model.divisible:
        known = replace(costs.model, attention=known.attention, messages=known.messages, block=known.block)
    if known.block > 1 and profile is not None:  # layers are of several kinds
        kept = spread_memory(kept, estimated, profile.layers)
        known = spread_loads(known, loads(build), profile.layers)
    layers = costs.layers
    if hides and profile is None and not any(layers.messages):
        layers = with_messages(layers, build)
    if profile is None or profile.facts.recompute is None:  # else measured times include it
        again = recomputed_share(model.recompute, build)
        layers = replace(layers, stock_recompute=again, recomputed_layers=model.recompute.layers or None)
    known = replace(known, stand_in=(int(first), int(last)), ends=model.ends, shared_vocabulary=shared)
    return replace(costs, layers=layers, model=known, memory=kept)


def with_messages(layers: LayerTimes, build: Build, prices: Prices = ANY) -> LayerTimes:
    """Adds the time in which F and I wait for messages of experts, and other work may run, to ``layers``.

    Args:
        layers: times of F and I.
        build: the model as built.
        prices: prices of the device, which say what share of both that is.
    """
    forward, input_grad = (share * (1 - prices.exposed) for share in message_shares(build, prices, build.tokens))
    return replace(layers, messages=(forward * layers.forward, input_grad * layers.input_grad))


def hidden_states(model: TrainedModel, schedule: Schedule, messages: Sequence[int]) -> Sequence[int]:
    """Returns how many hidden states each rank holds beside activations.

    Graphs of layers read the gradient of an output from memory of their own, one for each of their slots.

    Args:
        model, schedule: the model as trained, and the plan.
        messages: peak number of messages on each rank.
    """
    if model.build.graphs is None:
        return messages
    return [held + slots for held, slots in zip(messages, slot_counts(schedule.order), strict=True)]


def rank_memory(
    model: TrainedModel,
    schedule: Schedule,
    on_stages: StageCosts,
    costs: Costs,
    layers: tuple[int, ...],
    messages: Sequence[int],
) -> tuple[RankMemory, ...]:
    """Memory of each rank of ``schedule``.

    Args:
        model: the model as trained.
        schedule, on_stages: the plan and its costs.
        costs: costs that the schedule was planned for, with the model's memory.
        layers: decoder layers of each stage.
        messages: peak number of messages on each rank.
    """
    assert costs.in_bytes is not None, "the model is known"
    sizes = parameters(model.build).by_stage(layers, schedule.placement.rank_of, costs.model.shared_vocabulary)
    states = hidden_states(model, schedule, messages)
    waiting = [model.message_bytes * count + model.graph_mask_bytes for count in states]
    return memory(schedule, on_stages, costs.in_bytes.of_rank(schedule.ranks), sizes, model.numbers, waiting)


def recomputed_share(recompute: Recompute, build: Build) -> float:
    """Share of the forward of a layer that I recomputes. Times given with ``--pipeline-costs`` do not include it.

    Args:
        recompute: Megatron's own recompute.
        build: the model as built.
    """
    if recompute.layers != 0:
        return 1.0
    if not recompute.modules:
        return 0.0
    parts = works(build, "".join(typical_layers(build)))
    speed = build.quantized.speed if build.quantized else 1.0
    return sum(share(parts, module, speed) for module in recompute.modules)
