"""A job's own cost profile: what each stage of a pipeline was measured to take and hold, and what plans make of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.measure.profile_facts import CopyRates, Facts, copy_time
from megatron.schedules.schedule.costs import LAYER_INPUT, MOST_SHARE, Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import OF_RANKS, SEEN_BY, Kind, Share
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts


class Measured(NamedTuple):
    """Times of passes of one kind on one stage, in milliseconds.

    Args:
        median: of the replica that takes longest, for all others wait for it.
        low, high: of ten passes one is shorter, one longer: the least and the most of any replica.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class StageProfile:
    """One stage, and one microbatch on it.

    Args:
        layers: decoder layers.
        times: by kind; O and L are the copies themselves. I and W are always there, B where it was done.
        halved: whether I and W were never apart, and are parts of B as was planned.
        held: bytes from F until I, those that R makes again and those that are away included.
        sizes: bytes of each part of the activations that can be seen by itself (:data:`.kinds.SEEN_BY`).
        recomputed: the part of its layers that R does again.
    """

    layers: int
    times: Mapping[Kind, Measured]
    halved: bool = False
    held: float = 0.0
    sizes: Mapping[Share, float] = field(default_factory=lambda: dict.fromkeys(SEEN_BY, 0.0))
    recomputed: float = 0.0

    def median(self, kind: Kind) -> float:
        """Milliseconds; 0 for what the stage does not do."""
        found = self.times.get(kind)
        return 0.0 if found is None else found.median


@dataclass(frozen=True)
class JobProfile:
    """What a job measured of itself; a :class:`.profile_facts.Profile`.

    Args:
        facts: the model and the device.
        schedule, placement, microbatches: what it ran.
        iterations: the first and the last that were timed.
        replicas: ranks of each stage, over which everything was gathered.
        stages: in model order.
        latencies: rank, rank, and the latency of a message from the one to the other, in milliseconds.
        copy_gbps: how fast activations went to the host and came back, as other copies and messages let them; None
            where none did.
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

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def shares_vocabulary(self) -> bool:
        """Whether the output layer was S and T of all ranks."""
        return any(kind in OF_RANKS for stage in self.stages for kind in stage.times)

    @property
    def comm(self) -> float:
        """The usual hop, in milliseconds: of those from stage to stage. Others are of what all ranks do together."""
        along = set(pairwise(self.placement.rank_of))
        found = [time for source, to, time in self.latencies if (source, to) in along or (to, source) in along]
        return statistics.median(found) if found else 0.0

    @property
    def layer_seconds(self) -> tuple[float, float, float]:
        """See :class:`.profile_facts.Profile`."""
        forward, input_grad, weight_grad, _ = self.model.mean
        return forward / 1e3, input_grad / 1e3, weight_grad / 1e3

    @property
    def layer_bytes(self) -> float:
        """See :class:`.profile_facts.Profile`."""
        return self.model.mean.held if any(stage.held for stage in self.stages) else 0.0

    def copy_time(self, ranks: int, *, both_ways: bool = True) -> float | None:
        """See :class:`.profile_facts.Profile`."""
        return copy_time(self.copy_gbps, self.model.held_by_one_of(2 * ranks), both_ways=both_ways)

    @cached_property
    def model(self) -> ModelLoads:
        """Each layer as its stage's were measured, in milliseconds and bytes.

        What the first and the last stage take beyond as many layers of the others are the embedding and the output
        layer. Where all ranks shared the output layer it is what S and T took together.
        """
        usual = self._usual
        loads = [_of_layers(stage, usual, end=at in self._ends) for at, stage in enumerate(self.stages)]
        layers = [Part(split=load) for load, stage in zip(loads, self.stages, strict=True) for _ in range(stage.layers)]
        first = _beyond(self.stages[0], loads[0])
        if self.shares_vocabulary:
            last, kept = self._output_of_ranks()
        else:
            last = _beyond(self.stages[-1], loads[-1])
            kept = last.held / 2  # in single precision, of which sharing it leaves half
        return ModelLoads(Part(whole=first), tuple(layers), Part(whole=last), kept_for_output=(0.0, kept))

    @property
    def _ends(self) -> tuple[int, ...]:
        """Stages that have more than layers."""
        return (0,) if self.shares_vocabulary else (0, len(self.stages) - 1)

    @property
    def _usual(self) -> Load:
        """A layer of the stages that have nothing else; without any, the least of either end."""
        inner = [stage for at, stage in enumerate(self.stages) if at not in self._ends and stage.layers]
        if inner:
            every = Load()
            for stage in inner:
                every = every.plus(_all(stage))
            return every.over(Load(*[float(sum(stage.layers for stage in inner))] * 4))
        return _least([_each(stage) for stage in self.stages if stage.layers])

    def _output_of_ranks(self) -> tuple[Load, float]:
        """The output layer from its parts, and the bytes that wait for its weight gradient on all ranks."""
        parts = [stage for stage in self.stages if Kind.S in stage.times]
        there, weights = (sum(stage.median(kind) for stage in parts) for kind in (Kind.S, Kind.T))
        return Load(there / 2, there / 2, weights), sum(stage.sizes[Share.VOCABULARY] for stage in parts)

    def costs(self, ranks: int) -> Costs:
        """In milliseconds, for a pipeline of so many ranks; on the placement that was measured its stages' own times.

        Hops are those measured where there are as many ranks, and all like the usual one where there are not.
        """
        mean, scale = self.model.mean, len(self.model.layers) / (2 * ranks)
        forward, input_grad, weight_grad = (scale * each for each in mean[:3])
        again, layer_input = self._again
        return Costs(
            forward,
            input_grad,
            weight_grad,
            self.comm,
            weight_share=self._weight_share,
            model=self.model,
            copy=self.copy_time(ranks) or 0.0,
            again=again,
            layer_input=layer_input,
            latencies=self.latencies if ranks == self.placement.ranks else (),
        )

    def memory(self, planned: ModelMemory) -> ModelMemory:
        """See :class:`.profile_facts.Profile`. What Megatron recomputed was not there when bytes were counted."""
        if not self.layer_bytes:
            return planned
        _, layer_input = self._again
        return planned.measured(
            [layer.held for layer in self.model.layers],
            self._weight_share,
            layer_input * self.layer_bytes,
            (self.model.first.held, self.model.last.held),
            self.model.kept_for_output if self.shares_vocabulary else None,
            recomputed=True,
        )

    def costs_like(self, planned: Costs) -> Costs:
        """What was measured on this placement, in the form of the costs planned for."""
        return replace(
            self.costs(self.placement.ranks),
            memory=None if planned.memory is None else self.memory(planned.memory),
            shared_vocabulary=planned.shared_vocabulary,
        )

    def stage_costs(self, planned: Costs, decisions: Decisions) -> StageCosts:
        """What the stages of this placement were measured to cost, with what was decided but for their own layers."""
        found = self.costs_like(planned).on(self.placement, replace(decisions, layers=self.layers))
        times = {
            kind: tuple(
                stage.median(kind) if kind in stage.times else time
                for stage, time in zip(self.stages, each, strict=True)
            )
            for kind, each in found.times.items()
        }
        return replace(found, times=times)

    @property
    def _weight_share(self) -> float:
        """What waits for W against what waits for I, of all layers, which may be little beside what the ends hold."""
        if not self.layer_bytes:
            return 1.0
        held = self.model.mean.held * len(self.model.layers)
        return min(MOST_SHARE, sum(stage.sizes[Share.WEIGHTS] for stage in self.stages) / held)

    @property
    def _again(self) -> tuple[float, float]:
        """How long a forward takes that is done again, against F, and what F leaves to it, against all."""
        recomputed = [stage for stage in self.stages if stage.recomputed and Kind.R in stage.times]
        forwards = sum(stage.recomputed * stage.median(Kind.F) for stage in recomputed)
        if not forwards:
            return 1.0, LAYER_INPUT
        held = sum(stage.recomputed * stage.held for stage in recomputed)
        left = 1 - sum(stage.sizes[Share.RECOMPUTED] for stage in recomputed) / held if held else LAYER_INPUT
        return sum(stage.median(Kind.R) for stage in recomputed) / forwards, min(1.0, max(0.0, left))


def _all(stage: StageProfile) -> Load:
    """Bytes count as one a layer where nobody counted them."""
    times = (stage.median(kind) for kind in (Kind.F, Kind.I, Kind.W))
    return Load(*times)._replace(held=stage.held or float(stage.layers))


def _each(stage: StageProfile) -> Load:
    return _all(stage).over(Load(*[float(stage.layers)] * 4))


def _least(loads: Sequence[Load]) -> Load:
    forward, input_grad, weight_grad, held = map(min, zip(*loads, strict=True))
    return Load(forward, input_grad, weight_grad, held)


def _of_layers(stage: StageProfile, usual: Load, *, end: bool) -> Load:
    """One layer of ``stage``: where it has an ``end``, at most the usual one, but for W, which is the layers' alone."""
    if not stage.layers:
        return Load()
    own = _each(stage)
    if not end:
        return own
    return _least([own, usual])._replace(weight_grad=own.weight_grad)


def _beyond(stage: StageProfile, layer: Load) -> Load:
    """What ``stage`` takes beyond its layers; its weight gradient, which comes with I, counted as one half of that."""
    more = _all(stage).plus(layer, -stage.layers)
    backward = max(0.0, more.input_grad) + max(0.0, more.weight_grad)
    return Load(max(0.0, more.forward), backward / 2, backward / 2, max(0.0, more.held))
