"""A job's own cost profile: measured times and memory of each stage, and the costs for plans computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from megatron.schedules.measure.profile_facts import CopyRates, Facts, copy_time
from megatron.schedules.schedule.cost_parts import LAYER_INPUT, MOST_SHARE, HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import OF_RANKS, SEEN_BY, Kind, Share
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.json_files import Amount, Form

# Largest price of a split backward that is believed, as a part of I and W.
_MOST_PRICE = 0.5


class Measured(Form, frozen=True, kw_only=False):
    """Times of passes of one kind on one stage, in milliseconds, also in a file.

    Args:
        median: median of the slowest replica, for which all others wait.
        low, high: 10th and 90th percentile; the lowest and the highest of all replicas.
    """

    median: Amount
    low: Amount
    high: Amount

    @staticmethod
    def of(times: Sequence[float]) -> Measured:
        """Returns the median and percentiles of one or more times."""
        tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
        return Measured(statistics.median(times), tenths[0], tenths[-1])


@dataclass(frozen=True)
class StageProfile:
    """Measurements of one stage and one microbatch.

    Args:
        layers: decoder layers.
        times: times by kind; O and L are the copies. I and W are always present, B if it ran.
        halved: true if the backward was never split, so that I and W are estimated parts of B.
        held: bytes from F to I, including recomputed and offloaded ones.
        sizes: bytes of each part of the activations that can be measured separately (:data:`.kinds.SEEN_BY`).
        recomputed: share of its layers that R recomputes.
        messages: parts of F and I, milliseconds, in which it waits for messages of experts if nothing runs behind them.
    """

    layers: int
    times: Mapping[Kind, Measured]
    halved: bool = False
    held: float = 0.0
    sizes: Mapping[Share, float] = field(default_factory=lambda: dict.fromkeys(SEEN_BY, 0.0))
    recomputed: float = 0.0
    messages: Mapping[Kind, float] = field(default_factory=dict)

    def median(self, kind: Kind) -> float:
        """Median milliseconds; 0 for kinds that the stage does not have."""
        measured = self.times.get(kind)
        return 0.0 if measured is None else measured.median


@dataclass(frozen=True)
class JobProfile:
    """Measurements of a job.

    Args:
        facts: the model and the device.
        schedule, placement, microbatches: the schedule that ran.
        iterations: the first and the last timed iteration.
        replicas: ranks of each stage.
        stages: profiles in model order.
        latencies: link latency by sending and receiving rank, milliseconds.
        copy_gbps: speed of copies while other copies and messages run; None without copies.
        exposed: part of the time of experts' messages that weight gradients behind them left exposed; None if not
            measured.
    """

    facts: Facts
    schedule: str
    placement: Placement
    microbatches: int
    iterations: tuple[int, int]
    replicas: int
    stages: tuple[StageProfile, ...]
    latencies: tuple[tuple[int, int, float], ...] = ()
    copy_gbps: CopyRates | None = None
    exposed: float | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def shares_vocabulary(self) -> bool:
        """True if vocabulary parallelism was on."""
        return any(kind in OF_RANKS for stage in self.stages for kind in stage.times)

    @property
    def comm(self) -> float:
        """Median latency in milliseconds from stage to stage, without those of collectives."""
        along = set(pairwise(self.placement.rank_of))
        times = [time for source, to, time in self.latencies if (source, to) in along or (to, source) in along]
        return statistics.median(times) if times else 0.0

    @property
    def layer_seconds(self) -> tuple[float, float, float]:
        """F, I and W of an average decoder layer."""
        forward, input_grad, weight_grad, _ = self.model.mean
        return forward / 1e3, input_grad / 1e3, weight_grad / 1e3

    @property
    def layer_bytes(self) -> float:
        """Bytes of a microbatch's activations in an average decoder layer from F to I; 0 if not measured."""
        return self.model.mean.held if any(stage.held for stage in self.stages) else 0.0

    def copy_time(self, ranks: int, *, both_ways: bool = True) -> float | None:
        """Milliseconds to copy the activations of half a rank's layers one way; None if not measured."""
        return copy_time(self.copy_gbps, self.model.held_by_one_of(2 * ranks), both_ways=both_ways)

    @cached_property
    def model(self) -> ModelLoads:
        """Each layer as measured on its stage, in milliseconds and bytes.

        The embedding and the output layer are what the first and the last stage need in addition to average layers.
        Under vocabulary parallelism the output layer is S and T together.
        """
        usual = self._usual
        loads = [_of_layers(stage, usual, end=at in self._ends) for at, stage in enumerate(self.stages)]
        layers = [Part(split=load) for load, stage in zip(loads, self.stages, strict=True) for _ in range(stage.layers)]
        first = _beyond(self.stages[0], loads[0])
        if self.shares_vocabulary:
            last, kept = self._output_of_ranks()
        else:
            last = _beyond(self.stages[-1], loads[-1])
            kept = last.held / 2  # under vocabulary parallelism half of the single-precision logits
        return ModelLoads(Part(whole=first), tuple(layers), Part(whole=last), kept_for_output=(0.0, kept))

    @property
    def _ends(self) -> tuple[int, ...]:
        """Stages with an embedding or an output layer."""
        return (0,) if self.shares_vocabulary else (0, len(self.stages) - 1)

    @property
    def _usual(self) -> Load:
        """Average layer of the stages without embedding and output layer.

        Without such stages, it is the least of the first and the last stage.
        """
        inner = [stage for at, stage in enumerate(self.stages) if at not in self._ends and stage.layers]
        if inner:
            every = Load()
            for stage in inner:
                every = every.plus(_all(stage))
            return every.over(Load(*[float(sum(stage.layers for stage in inner))] * 4))
        return _least([_each(stage) for stage in self.stages if stage.layers])

    def _output_of_ranks(self) -> tuple[Load, float]:
        """The output layer from S and T, and the bytes that wait for its weight gradient on all ranks."""
        parts = [stage for stage in self.stages if Kind.S in stage.times]
        there, weights = (sum(stage.median(kind) for stage in parts) for kind in (Kind.S, Kind.T))
        return Load(there / 2, there / 2, weights), sum(stage.sizes[Share.VOCABULARY] for stage in parts)

    def costs(self, ranks: int) -> Costs:
        """Costs in milliseconds for a pipeline of ``ranks`` ranks.

        Uses the measured latencies if the number of ranks is the same, else their median.
        """
        mean, scale = self.model.mean, len(self.model.layers) / (2 * ranks)
        forward, input_grad, weight_grad = (scale * of_layer for of_layer in mean[:3])
        messages = min(forward, self._messages(Kind.F, ranks)), min(input_grad, self._messages(Kind.I, ranks))
        time, layer_input = self._recompute
        return Costs(
            LayerTimes(
                forward,
                input_grad,
                weight_grad,
                messages,
                recompute_time=time,
                splitting=self._splitting * (input_grad + weight_grad),
            ),
            self.model,
            Link(self.comm, self.latencies if ranks == self.placement.ranks else ()),
            HostCopies(self.copy_time(ranks) or 0.0),
            MemoryShares(self._weight_share, layer_input=layer_input),
        )

    def _messages(self, kind: Kind, ranks: int) -> float:
        """Time of experts' messages in half the layers of one of ``ranks`` ranks, milliseconds."""
        return sum(stage.messages.get(kind, 0.0) for stage in self.stages) / (2 * ranks)

    def memory(self, planned: ModelMemory) -> ModelMemory:
        """Returns ``planned`` with measured instead of estimated bytes."""
        if not self.layer_bytes:
            return planned
        _, layer_input = self._recompute
        return planned.measured(
            [layer.held for layer in self.model.layers],
            self._weight_share,
            layer_input * self.layer_bytes,
            (self.model.first.held, self.model.last.held),
            self.model.kept_for_output if self.shares_vocabulary else None,
            recomputed=self.facts.recompute is not None,
        )

    def costs_like(self, planned: Costs) -> Costs:
        """Returns the measured costs on this placement, in the form of ``planned``."""
        measured = self.costs(self.placement.ranks)
        return replace(
            measured,
            model=replace(measured.model, shared_vocabulary=planned.model.shared_vocabulary),
            memory=self.memory(planned.in_bytes) if planned.in_bytes else measured.memory,
        )

    def stage_costs(self, planned: Costs, decisions: Decisions) -> StageCosts:
        """Returns the measured costs of this placement's stages under ``decisions``, with the stages' own layers."""
        costs = self.costs_like(planned).on(self.placement, replace(decisions, layers=self.layers))
        times = {
            kind: tuple(
                stage.median(kind) if kind in stage.times else time
                for stage, time in zip(self.stages, by_stage, strict=True)
            )
            for kind, by_stage in costs.times.items()
        }
        messages = {
            kind: tuple(map(min, (stage.messages.get(kind, 0.0) for stage in self.stages), times[kind]))
            for kind in (Kind.F, Kind.I)
        }
        return replace(costs, times=times, messages={**costs.messages, **messages} if costs.has_messages else {})

    @property
    def _splitting(self) -> float:
        """Price of a split backward as a part of I and W, from stages that ran both; 0 if none did."""
        both = [stage for stage in self.stages if not stage.halved and Kind.B in stage.times]
        split = sum(stage.median(Kind.I) + stage.median(Kind.W) for stage in both)
        whole = sum(stage.median(Kind.B) for stage in both)
        return min(_MOST_PRICE, max(0.0, 1 - whole / split)) if split else 0.0

    @property
    def _weight_share(self) -> float:
        """Bytes of all layers that wait for W over those that wait for I."""
        if not self.layer_bytes:
            return 1.0
        held = self.model.mean.held * len(self.model.layers)
        return min(MOST_SHARE, sum(stage.sizes[Share.WEIGHTS] for stage in self.stages) / held)

    @property
    def _recompute(self) -> tuple[float, float]:
        """Returns the time of a recompute over F's, and the share of the activations that stays allocated for it."""
        recomputed = [stage for stage in self.stages if stage.recomputed and Kind.R in stage.times]
        forwards = sum(stage.recomputed * stage.median(Kind.F) for stage in recomputed)
        if not forwards:
            return 1.0, LAYER_INPUT
        held = sum(stage.recomputed * stage.held for stage in recomputed)
        left = 1 - sum(stage.sizes[Share.RECOMPUTED] for stage in recomputed) / held if held else LAYER_INPUT
        return sum(stage.median(Kind.R) for stage in recomputed) / forwards, min(1.0, max(0.0, left))


def _all(stage: StageProfile) -> Load:
    """Load of a stage; one byte per layer if bytes were not measured."""
    times = (stage.median(kind) for kind in (Kind.F, Kind.I, Kind.W))
    return Load(*times)._replace(held=stage.held or float(stage.layers))


def _each(stage: StageProfile) -> Load:
    return _all(stage).over(Load(*[float(stage.layers)] * 4))


def _least(loads: Sequence[Load]) -> Load:
    forward, input_grad, weight_grad, held = map(min, zip(*loads, strict=True))
    return Load(forward, input_grad, weight_grad, held)


def _of_layers(stage: StageProfile, usual: Load, *, end: bool) -> Load:
    """Load of one layer of ``stage``.

    With an embedding or output layer (``end``), it is at most the average one, except for W.
    """
    if not stage.layers:
        return Load()
    own = _each(stage)
    if not end:
        return own
    return _least([own, usual])._replace(weight_grad=own.weight_grad)


def _beyond(stage: StageProfile, layer: Load) -> Load:
    """Load of ``stage`` beyond its layers. Half of its backward counts as the weight gradient, which runs in I."""
    more = _all(stage).plus(layer, -stage.layers)
    backward = max(0.0, more.input_grad) + max(0.0, more.weight_grad)
    return Load(max(0.0, more.forward), backward / 2, backward / 2, max(0.0, more.held))
