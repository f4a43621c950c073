"""Costs: times and activation memory of passes over half a rank's layers. The costs of each stage follow from them.

Costs are measured, given or estimated. Planning never changes them; its choices are in :class:`.Decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part, without_noise
from megatron.schedules.schedule.model_memory import ModelMemory, StageMemory
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError

# Bounds of times and weights. Sums of their products stay far from the limits of a float.
_LEAST, _MOST = 1e-100, 1e100
# Largest weight_share. No linear layer's W needs so much more memory than its I, so a larger value is a mistake.
MOST_SHARE = 100
# Part of a layer's activations that is its input: 2 of some 34 bytes per token and hidden unit.
LAYER_INPUT = 0.06
# Fields of Costs that are shares: name, what they are a share of, and the maximum.
_SHARES = (
    ("weight_share", "memory held until W", MOST_SHARE),
    ("stock_recompute", "the forward that is recomputed", 1),
    ("layer_input", "memory that is a layer's input", 1),
    ("kept", "memory kept for recomputing", 1),
)
# Fields of Costs that are times.
_TIMES = ("forward", "input_grad", "weight_grad", "comm", "copy")
# Largest ratio of two times. Beyond it the shorter one is lost to rounding.
_APART = 1e15


def _fault(values: Iterable[float], what: str, *, zero: bool) -> str:
    """Requirement that one of ``values`` breaks: ``what``, or the bounds. Empty if all are valid."""
    wrong = [value for value in values if not (_LEAST <= value <= _MOST or (zero and value == 0))]
    if any(0 < value < math.inf for value in wrong):
        return f"from {_LEAST:g} to {_MOST:g}"
    return what if wrong else ""


@dataclass(frozen=True)
class Costs:
    """Costs of a pipeline. Times are those of half a rank's decoder layers, all in one unit of your choice.

    With c chunks per rank a stage takes 2/c of these times, so every placement does the same work.

    Args:
        forward, input_grad, weight_grad: times of F, I (the paper's B) and W.
        comm: P2P latency between two ranks.
        stage_weights, stage_activations: relative time and activation memory of each stage; None: all 1. The list may
            be a multiple of the number of stages: a stage then uses the mean of its slices.
        weight_share: activations from I to W over those from F to I. May exceed 1, since I makes gradients for W.
        stock_recompute: part of F that Megatron's own recompute repeats inside I.
        recomputed_layers: number of the first layers of each stage that ``stock_recompute`` is for; None for all. Needs
            ``model``.
        kept: part of the activations that F keeps under Megatron's own recompute. The unit of memory is activations
            without recompute, so 1F1B without recompute holds d microbatches.
        model: loads of the model's parts, relative to its average decoder layer; None if unknown. The times above
            exclude the embedding and the output layer. ``stage_weights`` and ``stage_activations`` override it.
        shared_vocabulary: whether all ranks share the output layer (vocabulary parallelism), with S and T passes.
        layer_input: part of a layer's activations that stays if an R pass recomputes the layer.
        recompute_time: time of R relative to F.
        copy: time to copy the activations of half a rank's layers in one direction, in O and L.
        one_way: whether a rank copies in one direction at a time.
        latencies: (from, to, time) for each pair of ranks whose latency is not ``comm``.
        memory: bytes that the model's parts keep; needs ``model``. Overrides all shares of memory above.
        of_device: whether a memory limit is what parameters leave of a device, see :class:`.StageCosts`.
        attention: attention's parts of a layer's F and I, which grow with the square of the sequence length
            (:mod:`.stage_costs`).
        messages: parts of ``forward`` and of ``input_grad`` in which a rank waits for messages of its experts. Weight
            gradients may run meanwhile (:mod:`.hidden_messages`).
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    comm: float = 0.0
    stage_weights: tuple[float, ...] | None = None
    stage_activations: tuple[float, ...] | None = None
    weight_share: float = 1.0
    stock_recompute: float = 0.0
    recomputed_layers: int | None = None
    kept: float = 1.0
    model: ModelLoads | None = None
    shared_vocabulary: bool = False
    layer_input: float = LAYER_INPUT
    copy: float = 0.0
    one_way: bool = False
    recompute_time: float = 1.0
    latencies: tuple[tuple[int, int, float], ...] = ()
    attention: tuple[float, float] = (0.0, 0.0)
    memory: ModelMemory | None = None
    of_device: bool = False
    messages: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        times = (self.forward, self.input_grad, self.weight_grad)
        if fault := _fault(times, "positive numbers", zero=False):
            raise PlanError(f"costs F,I,W must be {fault}, not {','.join(f'{t:g}' for t in times)}", "costs")
        latencies = [self.comm, *(time for _, _, time in self.latencies)]
        for latency in latencies:
            if fault := _fault([latency], "zero or a positive number", zero=True):
                raise PlanError(f"the P2P latency must be {fault}, not {latency:g}", "costs")
        if max(*times, *latencies) > _APART * min(times):
            raise PlanError(f"passes and P2P latency may differ {_APART:g} times at most", "costs")
        for part, scale in (("stage_weights", self.stage_weights), ("stage_activations", self.stage_activations)):
            if fault := _fault(scale or (), "zero or positive numbers", zero=True):
                raise PlanError(f"per-stage weights must be {fault}", part)
        if self.stage_weights is not None and not any(self.stage_weights):
            raise PlanError("at least one stage must take time", "stage_weights")
        for part, what, most in _SHARES:
            if not 0 <= (share := getattr(self, part)) <= most:
                raise PlanError(f"the share of {what} must be from 0 to {most}, not {share:g}", part)
        if self.shared_vocabulary and (self.model is None or self.stage_weights or self.stage_activations):
            raise PlanError(
                "to share the vocabulary takes the model, which says what an output layer costs, and no weights",
                "shared_vocabulary",
            )
        if fault := _fault([self.recompute_time], "a positive number", zero=False):
            raise PlanError(f"the time of a recompute pass must be {fault}, not {self.recompute_time:g}", "costs")
        if fault := _fault([self.copy], "zero or a positive number", zero=True):
            raise PlanError(f"the time of a copy must be {fault}, not {self.copy:g}", "copy")
        for message, name, whole in zip(self.messages, "FI", times, strict=False):
            if not 0 <= message <= whole:
                raise PlanError(
                    f"messages of experts must take from 0 to {whole:g}, the time of {name} that they are part of, "
                    f"not {message:g}",
                    "costs",
                )

    @staticmethod
    def parse(text: str) -> Costs:
        """Reads ``F,I,W``, ``F,I,W,LATENCY`` or ``F,I,W,LATENCY,MESSAGES``; raises :class:`PlanError` for others.

        MESSAGES is the time in F, and the time in I, in which a rank waits for messages of its experts.
        """
        try:
            numbers = [float(part) for part in text.split(",")] if text.isascii() and "_" not in text else []
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4, 5):
            raise PlanError(
                f"costs are F,I,W[,LATENCY[,MESSAGES]], three to five numbers such as 1,1.1,0.75,0.05, not {text!r}",
                "costs",
            )
        forward, input_grad, weight_grad, comm, each = (*numbers, 0.0, 0.0)[:5]
        return Costs(forward, input_grad, weight_grad, comm, messages=(each, each))

    @property
    def last_in_layers(self) -> float:
        """Time of all parts after the decoder layers, in average decoder layers; 0 if the model is unknown."""
        if self.model is None:
            return 0.0
        last, mean = self.model.last.split.plus(self.model.last.whole), self.model.mean
        times = self.forward, self.input_grad, self.weight_grad
        each = sum(time * load / unit for time, load, unit in zip(times, last[:3], mean[:3], strict=True))
        return each / sum(times)

    def around_one(self) -> Costs:
        """Returns these costs scaled to numbers around 1.

        The searches' rounding tolerance assumes such numbers. The same costs in another unit give the same numbers to
        the last digit, so no decision depends on the unit.
        """
        in_forwards = {time: without_noise(getattr(self, time) / self.forward) for time in _TIMES}
        one = 2.0 ** math.frexp(1.0 + in_forwards["input_grad"] + in_forwards["weight_grad"])[1]
        times: dict[str, Any] = {time: each / one for time, each in in_forwards.items()}
        latencies = tuple((source, to, without_noise(time / self.forward) / one) for source, to, time in self.latencies)
        forward, input_grad = (without_noise(time / self.forward) / one for time in self.messages)
        return replace(self, **times, latencies=latencies, messages=(forward, input_grad))

    def on(self, placement: Placement, decisions: Decisions = PLAIN) -> StageCosts:
        """Returns the costs of every stage of ``placement`` under ``decisions``."""
        parts = None if self.model is None else self._parts(self.model, placement, decisions)
        memory = self.memory_on(placement, decisions)
        activation, held = self._held(placement, parts, memory, decisions)
        recomputed, _ = decisions.savings_on(placement)
        repeated = self._repeated(placement, decisions)
        times = self._times(placement, parts, repeated)
        # ``copy`` is the time for half of the activations of an average rank's layers.
        copies = tuple(2 * self.copy * each for each in held[Share.OFFLOADED])
        times |= {
            Kind.R: tuple(share * time for share, time in zip(recomputed, times[Kind.R], strict=True)),
            Kind.O: copies,
            Kind.L: copies,
        }
        done = {Kind.R: decisions.recomputed, Kind.O: decisions.offloaded, Kind.L: decisions.offloaded}
        times = {kind: each for kind, each in times.items() if done.get(kind, ()) is not None}
        times |= self._vocabulary_times(placement)
        latencies = {(source, to): time for source, to, time in self.latencies}
        standing, passing = self._standing(placement, memory), self._passing(placement, memory, decisions)
        attention, messages = (
            self._of_layers(placement, parts, times.get(Kind.R, ()), repeated, shares) if any(given) else {}
            for given, shares in ((self.attention, self._attention), (self.messages, self._messages))
        )
        given = times, activation, self.comm, held, standing, self.one_way, latencies, attention, messages
        return StageCosts(*given, passing=passing, of_device=self.of_device)

    def layers_on(self, placement: Placement, decisions: Decisions = PLAIN) -> tuple[int, ...] | None:
        """Number of decoder layers of each stage; None if the model is unknown.

        Raises:
            PlanError: if the decisions are for another number of stages.
        """
        if self.model is None:
            return None
        counts = self.model.evenly(placement.stages) if decisions.layers is None else decisions.layers
        if len(counts) != placement.stages:
            raise PlanError(f"layers of {len(counts)} stages given for {placement}", "layers")
        return counts

    def memory_on(self, placement: Placement, decisions: Decisions = PLAIN) -> list[StageMemory] | None:
        """Memory of each stage for one microbatch, bytes; None if it is unknown in bytes."""
        counts = self.layers_on(placement, decisions)
        if self.memory is None or counts is None or self.stage_activations is not None:
            return None
        decisions.savings_on(placement)  # raises if they are for another placement
        recomputed, offloaded = (
            None if shares is None else [round(share * count) for share, count in zip(shares, counts, strict=True)]
            for shares in (decisions.recomputed, decisions.offloaded)
        )
        return self.memory.by_stage(counts, recomputed, offloaded)

    def _parts(self, model: ModelLoads, placement: Placement, decisions: Decisions) -> list[Part]:
        """Parts of the model on each stage."""
        counts = self.layers_on(placement, decisions) or ()
        return (model.without_output if self.shared_vocabulary else model).by_stage(counts)

    def _repeated(self, placement: Placement, decisions: Decisions) -> list[float]:
        """Part of F that Megatron's own recompute repeats in I, for each stage."""
        counts, first = self.layers_on(placement, decisions), self.recomputed_layers
        if first is None or counts is None:
            return [self.stock_recompute] * placement.stages
        return [self.stock_recompute * min(count, first) / max(count, 1) for count in counts]

    def _times(
        self, placement: Placement, parts: Sequence[Part] | None, repeated: Sequence[float]
    ) -> dict[Kind, tuple[float, ...]]:
        times = {
            Kind.F: self.forward,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
            Kind.R: self.recompute_time * self.forward,
        }
        by_stage = {kind: [time] * placement.stages for kind, time in times.items()}
        by_stage[Kind.I] = [time + again * self.forward for time, again in zip(by_stage[Kind.I], repeated, strict=True)]
        if parts is None or self.model is None or self.stage_weights is not None:
            share, weights = 2 / placement.chunks, _per_stage(self.stage_weights, placement, "stage_weights")
            return {
                kind: tuple(time * share * w for time, w in zip(each, weights, strict=True))
                for kind, each in by_stage.items()
            }
        split, whole = ([self.model.in_layers(load) for load in loads] for loads in zip(*parts, strict=True))
        # Work of each stage by kind, in average layers. Other kinds scale with F.
        layers = {
            Kind.F: [each.forward for each in split],
            Kind.I: [each.input_grad for each in split],
            Kind.W: [each.weight_grad for each in split],
        }
        ends = {
            Kind.F: [self.forward * each.forward for each in whole],
            Kind.I: [self.input_grad * each.input_grad + self.weight_grad * each.weight_grad for each in whole],
        }
        one, none = 2 * placement.ranks / len(self.model.layers), [0.0] * placement.stages
        return {
            kind: tuple(
                one * (time * number + end)
                for time, number, end in zip(each, layers.get(kind, layers[Kind.F]), ends.get(kind, none), strict=True)
            )
            for kind, each in by_stage.items()
        }

    def _attention(self, again: float) -> dict[Kind, float]:
        """Attention's share of F, I and R of a decoder layer whose I repeats the part ``again`` of F."""
        forward, input_grad = self.attention
        repeated = again * self.forward
        both = input_grad * self.input_grad + forward * repeated
        return {Kind.F: forward, Kind.I: both / (self.input_grad + repeated), Kind.R: forward}

    def _messages(self, again: float) -> dict[Kind, float]:
        """Share of F, I and R of such a layer in which it waits for messages of experts."""
        forward, input_grad = self.messages
        repeated = again * self.forward
        both = input_grad + again * forward
        return {
            Kind.F: forward / self.forward,
            Kind.I: both / (self.input_grad + repeated),
            Kind.R: min(1.0, forward / (self.recompute_time * self.forward)),
        }

    def _of_layers(
        self,
        placement: Placement,
        parts: Sequence[Part] | None,
        recomputes: Sequence[float],
        repeated: Sequence[float],
        shares: Callable[[float], Mapping[Kind, float]],
    ) -> dict[Kind, tuple[float, ...]]:
        """Shares of the time of each stage's F, I and R. If the model is known, only its decoder layers count.

        ``recomputes`` are the times of each R, and ``repeated`` the parts of F that each I repeats.
        """
        layers = self._times(placement, parts and [part._replace(whole=Load()) for part in parts], repeated)
        layers[Kind.R] = tuple(recomputes)
        of = [shares(again) for again in repeated]
        return {
            kind: tuple(each[kind] * time for each, time in zip(of, layers[kind], strict=True))
            for kind in (Kind.F, Kind.I, Kind.R)
            if layers[kind]
        }

    def _held(
        self,
        placement: Placement,
        parts: Sequence[Part] | None,
        stages: Sequence[StageMemory] | None,
        decisions: Decisions,
    ) -> tuple[tuple[float, ...], dict[Share, tuple[float, ...]]]:
        """Activation memory that F keeps in total, and the size of every share."""
        vocabulary = {Share.VOCABULARY: self._vocabulary_held(placement)}
        if self.memory is not None and stages is not None:
            activation, held = _held_by_stage(stages, self.memory.of_rank(placement.ranks))
            return activation, held | vocabulary
        if parts is None or self.model is None or self.stage_activations is not None:
            scale = _per_stage(self.stage_activations, placement, "stage_activations")
            layers = activation = tuple(each / placement.chunks for each in scale)
        else:
            whole_rank = self.model.held_by_one_of(placement.ranks)
            activation = tuple(part.held / whole_rank for part in parts)
            # The embedding and the output layer recompute nothing and leave nothing to W.
            layers = tuple(part.split.held / whole_rank for part in parts)
        recomputed, offloaded = decisions.savings_on(placement)
        by_recompute = [
            share * max(0.0, self.kept - self.layer_input) * each
            for share, each in zip(recomputed, layers, strict=True)
        ]
        by_offload = [share * self.kept * each for share, each in zip(offloaded, layers, strict=True)]
        stays = zip(activation, layers, by_recompute, by_offload, strict=True)
        return activation, vocabulary | {
            Share.FORWARD: tuple(max(0.0, all - (1 - self.kept) * some - r - o) for all, some, r, o in stays),
            Share.WEIGHTS: tuple(self.weight_share * each for each in layers),
            Share.RECOMPUTED: tuple(by_recompute),
            Share.OFFLOADED: tuple(by_offload),
        }

    def _standing(self, placement: Placement, stages: Sequence[StageMemory] | None) -> tuple[float, ...]:
        if self.memory is None or stages is None or not any(stage.parameters for stage in stages):
            return ()
        unit = self.memory.of_rank(placement.ranks)
        return tuple(stage.parameters / unit for stage in stages)

    def _passing(
        self, placement: Placement, stages: Sequence[StageMemory] | None, decisions: Decisions
    ) -> dict[Kind, tuple[float, ...]]:
        """Temporary memory of Megatron's own recompute during a B and an I of each stage."""
        counts = self.layers_on(placement, decisions)
        if self.memory is None or stages is None or counts is None or not self.memory.most_passing:
            return {}
        unit, found = self.memory.of_rank(placement.ranks), self.memory.passing(counts)
        return {
            Kind.B: tuple(each.whole / unit for each in found),
            Kind.I: tuple(each.input_grad / unit for each in found),
        }

    def _vocabulary_times(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """Times of S (forward and input gradient of a rank's part of the output layer) and T (its weight gradient)."""
        if not self.shared_vocabulary or self.model is None:
            return {}
        whole, each = self.model.in_layers(self.model.last.whole), 2 / len(self.model.layers)
        times = {
            Kind.S: each * (self.forward * whole.forward + self.input_grad * whole.input_grad),
            Kind.T: each * self.weight_grad * whole.weight_grad,
        }
        return {kind: _on_last_of_ranks(time, placement) for kind, time in times.items()}

    def _vocabulary_held(self, placement: Placement) -> tuple[float, ...]:
        if not self.shared_vocabulary or self.model is None:
            return (0.0,) * placement.stages
        alike, together = self.model.kept_for_output if self.memory is None else self.memory.vocabulary
        whole_rank = (self.model.held_by_one_of if self.memory is None else self.memory.of_rank)(placement.ranks)
        return _on_last_of_ranks((alike + together / placement.ranks) / whole_rank, placement)


def _held_by_stage(
    stages: Sequence[StageMemory], unit: float
) -> tuple[tuple[float, ...], dict[Share, tuple[float, ...]]]:
    """Activation memory that F keeps in total, and the size of every share, in multiples of ``unit`` bytes."""
    forward, weights, recomputed, offloaded, _ = (
        tuple(each / unit for each in column) for column in zip(*stages, strict=True)
    )
    return tuple(map(sum, zip(forward, recomputed, offloaded, strict=True))), {
        Share.FORWARD: forward,
        Share.WEIGHTS: weights,
        Share.RECOMPUTED: recomputed,
        Share.OFFLOADED: offloaded,
    }


def _on_last_of_ranks(value: float, placement: Placement) -> tuple[float, ...]:
    """``value`` for the last stage of each rank, 0 for other stages."""
    last = {placement.stages_of(rank)[-1] for rank in range(placement.ranks)}
    return tuple(value if stage in last else 0.0 for stage in range(placement.stages))


def _per_stage(values: Sequence[float] | None, placement: Placement, what: str) -> Sequence[float]:
    """One value per stage. A longer list has several slices per stage; a stage uses their mean."""
    stages = placement.stages
    if values is None:
        return (1.0,) * stages
    if not values or len(values) % stages:
        given = f"{len(values)} {what.replace('_', ' ')}"
        raise PlanError(f"{given} given for {placement}, which has {stages} stages", what)
    each = len(values) // stages
    return tuple(sum(values[s * each : (s + 1) * each]) / each for s in range(stages))
