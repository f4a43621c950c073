"""Costs: times and activation memory of a pipeline's passes. The costs of each stage follow from them.

Costs are measured, given or estimated. Planning never changes them; its choices are in :class:`.Decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.model_loads import EQUAL, ModelLoads, without_noise
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError

# Largest ratio of two times. Beyond it the shorter one is lost to rounding.
_APART = 1e15


@dataclass(frozen=True)
class Costs:
    """Costs of a pipeline. All times have one unit of your choice.

    Args:
        layers: times of half a rank's average decoder layers.
        model: each decoder layer, and the parts before and after them, relative to the average layer.
        link: latency of messages between ranks.
        copies: copies of activations to the host and back.
        memory: activation memory of the layers in shares; of all parts in bytes if their sizes are known. The unit of
            memory limits is activations without recompute, so 1F1B without recompute holds d microbatches.
    """

    layers: LayerTimes = field(default_factory=LayerTimes)
    model: ModelLoads = EQUAL
    link: Link = field(default_factory=Link)
    copies: HostCopies = field(default_factory=HostCopies)
    memory: MemoryShares | ModelMemory = field(default_factory=MemoryShares)

    def __post_init__(self) -> None:
        times = self.layers.passes
        if max(*times, *self.link.latencies) > _APART * min(times):
            raise PlanError(f"passes and P2P latency may differ {_APART:g} times at most", "costs")
        if self.model.divisible and self.in_bytes:
            raise PlanError("the bytes of layers need their number", "costs")

    @staticmethod
    def of(forward: float, input_grad: float, weight_grad: float, latency: float = 0.0) -> Costs:
        """Returns the costs of equal layers, from the times of F, I and W of half a rank and the P2P latency."""
        return Costs(LayerTimes(forward, input_grad, weight_grad), link=Link(latency))

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
        forward, input_grad, weight_grad, latency, messages = (*numbers, 0.0, 0.0)[:5]
        return Costs(LayerTimes(forward, input_grad, weight_grad, (messages, messages)), link=Link(latency))

    @property
    def in_bytes(self) -> ModelMemory | None:
        """Memory of the model's parts in bytes; None if only shares are known."""
        return self.memory if isinstance(self.memory, ModelMemory) else None

    @property
    def in_shares(self) -> MemoryShares:
        """Memory of the layers in shares, also if their bytes are known."""
        return self.memory if isinstance(self.memory, MemoryShares) else MemoryShares(self.memory.weight_share)

    @property
    def without_messages(self) -> Costs:
        """These costs without messages of experts, which count as other work of F and I."""
        return replace(self, layers=replace(self.layers, messages=(0.0, 0.0)))

    @property
    def last_in_layers(self) -> float:
        """Time of all parts after the decoder layers, in average decoder layers; 0 if the model is unknown."""
        last, mean, times = self.model.last.split.plus(self.model.last.whole), self.model.mean, self.layers.passes
        return sum(time * load / unit for time, load, unit in zip(times, last[:3], mean[:3], strict=True)) / sum(times)

    def scaled(self, scale: Callable[[float], float]) -> Costs:
        """Returns these costs with all times in another unit."""
        layers, link, copies = self.layers.scaled(scale), self.link.scaled(scale), self.copies.scaled(scale)
        return replace(self, layers=layers, link=link, copies=copies)

    def around_one(self) -> Costs:
        """Returns these costs scaled to numbers around 1.

        The searches' rounding tolerance assumes such numbers. The same costs in another unit give the same numbers to
        the last digit, so no decision depends on the unit.
        """
        forward, input_grad, weight_grad = self.layers.passes
        one = 2.0 ** math.frexp(1.0 + without_noise(input_grad / forward) + without_noise(weight_grad / forward))[1]
        return self.scaled(lambda time: without_noise(time / forward) / one)

    def on(self, placement: Placement, decisions: Decisions = PLAIN) -> StageCosts:
        """Returns the costs of every stage of ``placement`` under ``decisions``."""
        model, counts = self.model.on_stages(placement.stages), self._counts(placement, decisions)
        parts = (model.without_output if model.shared_vocabulary else model).by_stage(counts)
        savings = decisions.savings_on(placement)
        if isinstance(self.memory, MemoryShares):
            unit, (alike, together) = model.held_by_one_of(placement.ranks), model.kept_for_output
            memory = self.memory.on_stages(unit, parts, *savings)
        else:
            unit, (alike, together) = self.memory.of_rank(placement.ranks), self.memory.vocabulary
            memory = self.memory.on_stages(unit, counts, *savings)
        output = (alike + together / placement.ranks) / unit if model.shared_vocabulary else 0.0
        memory["held"][Share.VOCABULARY] = _on_last_of_ranks(output, placement)
        one, repeated = 2 * placement.ranks / len(model.layers), self.layers.repeated(counts)
        layers, ends = ([model.in_layers(load) for load in loads] for loads in zip(*parts, strict=True))
        times = self.layers.on_stages(one, layers, ends, repeated)
        recompute = tuple(share * time for share, time in zip(savings[0], times.pop(Kind.R), strict=True))
        # The time is that of half of the activations of an average rank's layers.
        copies = tuple(2 * self.copies.time * size for size in memory["held"][Share.OFFLOADED])
        times |= {Kind.R: recompute} if decisions.recomputed is not None else {}
        times |= {Kind.O: copies, Kind.L: copies} if decisions.offloaded is not None else {}
        recomputed = None if decisions.recomputed is None else savings[0]
        amounts = model.on_each_stage(model.attention, counts), model.on_each_stage(model.messages, counts)
        attention, messages = self.layers.of_layers(one, layers, amounts, recomputed, repeated)
        return StageCosts(
            times | self._vocabulary_times(placement, model),
            comm=self.link.latency,
            one_way=self.copies.one_way,
            latencies={(source, to): latency for source, to, latency in self.link.pairs},
            attention=attention,
            messages=messages,
            splitting=self.layers.saved_by_wholes(one, layers),
            **memory,
        )

    def layers_on(self, placement: Placement, decisions: Decisions = PLAIN) -> tuple[int, ...] | None:
        """Number of decoder layers of each stage; None if the model is unknown.

        Raises:
            PlanError: if the decisions are for another number of stages.
        """
        return None if self.model.divisible else self._counts(placement, decisions)

    def _counts(self, placement: Placement, decisions: Decisions) -> tuple[int, ...]:
        """Number of layers of each stage; one if the model is unknown."""
        if (counts := decisions.layers) is None or self.model.divisible:
            counts = self.model.on_stages(placement.stages).evenly(placement.stages)
        if len(counts) != placement.stages:
            raise PlanError(f"layers of {len(counts)} stages given for {placement}", "layers")
        return counts

    def _vocabulary_times(self, placement: Placement, model: ModelLoads) -> dict[Kind, tuple[float, ...]]:
        """Times of S (forward and input gradient of a rank's part of the output layer) and T (its weight gradient)."""
        if not model.shared_vocabulary:
            return {}
        whole, one = model.in_layers(model.last.whole), 2 / len(model.layers)
        forward, input_grad, weight_grad = self.layers.passes
        times = {
            Kind.S: one * (forward * whole.forward + input_grad * whole.input_grad),
            Kind.T: one * weight_grad * whole.weight_grad,
        }
        return {kind: _on_last_of_ranks(time, placement) for kind, time in times.items()}


def _on_last_of_ranks(value: float, placement: Placement) -> tuple[float, ...]:
    """``value`` for the last stage of each rank, 0 for other stages."""
    last = {placement.stages_of(rank)[-1] for rank in range(placement.ranks)}
    return tuple(value if stage in last else 0.0 for stage in range(placement.stages))
