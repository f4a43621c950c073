"""Bytes that a model's parts keep on a rank, and from them what each stage keeps of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts


class LayerMemory(NamedTuple):
    """One decoder layer and one microbatch, bytes.

    Args:
        full: activations from F to I where nothing is recomputed.
        kept: those of them that stay where Megatron recomputes parts of the layer; ``full`` where it does not.
        weights: activations from I to W.
        parameters: weights, gradients and optimizer state.
    """

    full: float
    kept: float
    weights: float
    parameters: float = 0.0


class EndMemory(NamedTuple):
    """What stands before the first or after the last decoder layer; fields as in :class:`LayerMemory`."""

    kept: float = 0.0
    weights: float = 0.0
    parameters: float = 0.0


class StageMemory(NamedTuple):
    """One stage and one microbatch, bytes.

    Args:
        forward: activations from F to I, without the two that follow.
        weights: activations from I to W.
        recomputed: activations that R makes.
        offloaded: activations that O moves to the host.
        parameters: weights, gradients and optimizer state.
    """

    forward: float
    weights: float
    recomputed: float
    offloaded: float
    parameters: float


class Passing(NamedTuple):
    """Bytes that Megatron's own recompute holds while one backward pass runs: B, and I."""

    whole: float = 0.0
    input_grad: float = 0.0


@dataclass(frozen=True)
class ModelMemory:
    """A model, part by part, on one rank of its tensor- and context-parallel group.

    Args:
        layers: each decoder layer.
        input: bytes of a decoder layer's input, which stays where the whole layer is recomputed.
        first, last: what stands before and after the layers.
        mask: bytes of who attends to whom, which a microbatch brings to the layers of the first and the last stage.
        vocabulary: bytes that S leaves to T: on each rank, and on all ranks together.
        recomputed_layers: how many of each stage's layers Megatron recomputes as a whole, the first ones; None: all.
        together: how many of these keep one input among them.
    """

    layers: tuple[LayerMemory, ...]
    input: float
    first: EndMemory
    last: EndMemory
    mask: float = 0.0
    vocabulary: tuple[float, float] = (0.0, 0.0)
    recomputed_layers: int | None = 0
    together: int = 1

    def of_rank(self, ranks: int) -> float:
        """The unit of memory limits: what an average rank's layers keep of a microbatch if nothing is recomputed."""
        return sum(layer.full for layer in self.layers) / ranks

    @property
    def weight_share(self) -> float:
        """What the layers' I leave to W, against what their F leave to I."""
        kept = sum(layer.kept for layer in self.layers)
        return sum(layer.weights for layer in self.layers) / kept if kept else 1.0

    def measured(
        self,
        layers: Sequence[float],
        weight_share: float,
        input: float | None = None,
        ends: tuple[float, float] | None = None,
        vocabulary: tuple[float, float] | None = None,
        *,
        recomputed: bool,
    ) -> ModelMemory:
        """The same model with activations as they were measured; parameters and the rest stay as they are.

        Args:
            layers: of each decoder layer, bytes from F to I.
            weight_share: of these, the part from I to W.
            input: bytes of a layer's input; None where it was not measured.
            ends: bytes that stand before and after the layers; None where they were not measured.
            vocabulary: bytes that S leaves to T, on each rank and on all together; None where they were not measured.
            recomputed: whether Megatron's recompute was on and its savings are in these bytes.
        """
        shares = [1.0 if recomputed else layer.kept / layer.full for layer in self.layers]
        first, last = ends or (self.first.kept, self.last.kept)
        return replace(
            self,
            layers=tuple(
                LayerMemory(held, share * held, weight_share * held, layer.parameters)
                for layer, share, held in zip(self.layers, shares, layers, strict=True)
            ),
            input=self.input if input is None else input,
            first=self.first._replace(kept=first),
            last=self.last._replace(kept=last),
            mask=0.0,
            vocabulary=self.vocabulary if vocabulary is None else vocabulary,
            recomputed_layers=0 if recomputed else self.recomputed_layers,
        )

    def by_stage(
        self, counts: Sequence[int], recomputed: Sequence[int] | None = None, offloaded: Sequence[int] | None = None
    ) -> list[StageMemory]:
        """What each stage keeps.

        Args:
            counts: decoder layers of each stage, in model order.
            recomputed, offloaded: how many of each stage's layers have an R, and an O. Those with an O come first.
        """
        found, begin = [], 0
        none = [0] * len(counts)
        for count, recompute, offload in zip(counts, recomputed or none, offloaded or none, strict=True):
            found.append(self._stage(begin, count, recompute, offload))
            begin += count
        for stage in {0, len(counts) - 1}:
            # Other stages have none, or one for all microbatches.
            found[stage] = found[stage]._replace(forward=found[stage].forward + (self.mask if counts[stage] else 0.0))
        for stage, end in ((0, self.first), (-1, self.last)):
            one = found[stage]
            found[stage] = one._replace(
                forward=one.forward + end.kept,
                weights=one.weights + end.weights,
                parameters=one.parameters + end.parameters,
            )
        return found

    def passing(self, counts: Sequence[int]) -> list[Passing]:
        """What each stage holds for a moment in its backward passes."""
        found, begin = [], 0
        for count in counts:
            found.append(self._passing(begin, count))
            begin += count
        # What stands behind the last layer is freed before that layer is recomputed.
        found[-1] = found[-1]._replace(whole=max(0.0, found[-1].whole - self.last.kept))
        return found

    @property
    def most_passing(self) -> float:
        """The most that any stage of any layer partition holds for a moment in a backward pass."""
        whole = sorted((layer.full for layer in self.layers), reverse=True)[: self.together]
        parts = max((layer.full - layer.kept for layer in self.layers), default=0.0)
        return sum(whole) if self.recomputed_layers != 0 else parts

    def _stage(self, begin: int, count: int, recompute: int, offload: int) -> StageMemory:
        key = begin, count, recompute, offload
        if key not in self._known:
            forward = weights = recomputed = moved = parameters = 0.0
            for at, layer in enumerate(self.layers[begin : begin + count]):
                kept = layer.kept
                if at < self._recomputed(count):
                    kept = 0.0 if at % self.together else self.input
                if at < offload:
                    moved += kept
                elif at < offload + recompute:
                    forward += self.input
                    recomputed += max(0.0, kept - self.input)
                else:
                    forward += kept
                weights += layer.weights
                parameters += layer.parameters
            self._known[key] = StageMemory(forward, weights, recomputed, moved, parameters)
        return self._known[key]

    def _passing(self, begin: int, count: int) -> Passing:
        layers = self.layers[begin : begin + count]
        most, recomputed = Passing(), self._recomputed(count)
        for at in range(recomputed):
            block = layers[at : at + self.together]
            # The block's input, which stays all the time, is a part of its first layer.
            full = sum(layer.full for layer in block) - self.input
            if full > most.whole:
                most = Passing(full, max(0.0, full - sum(layer.weights for layer in block)))
        if not recomputed:
            most = Passing(max((layer.full - layer.kept for layer in layers), default=0.0))
        return most

    def _recomputed(self, count: int) -> int:
        """How many of a stage's layers Megatron recomputes as a whole."""
        return count if self.recomputed_layers is None else min(count, self.recomputed_layers)

    @cached_property
    def _known(self) -> dict[tuple[int, int, int, int], StageMemory]:
        """Stages added up before: searches ask for the same ones again and again."""
        return {}


def activation_bytes(
    schedule: Schedule, costs: StageCosts, model: ModelMemory, counts: Sequence[int]
) -> tuple[float, ...]:
    """The most activation bytes that each rank holds at once, Megatron's recompute inside a backward pass included.

    Args:
        schedule, costs: the plan and what it was made for.
        model: what ``costs`` were made of.
        counts: decoder layers of each stage.
    """
    unit, passing = model.of_rank(schedule.ranks), model.passing(counts)
    return tuple(_peak(row, costs, unit, passing) for row in schedule.order)


def _peak(row: Sequence[Pass], costs: StageCosts, unit: float, passing: Sequence[Passing]) -> float:
    most = before = 0.0
    for (stage, kind, _), after in zip(row, accumulate(costs.changes_of(row)), strict=True):
        whole_backward, half = passing[stage]
        beside = {Kind.B: whole_backward, Kind.I: half}.get(kind, 0.0)
        most = max(most, unit * before + beside, unit * after + (beside if kind is Kind.I else 0.0))
        before = after
    return most
