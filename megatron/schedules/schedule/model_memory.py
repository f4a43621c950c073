"""Memory of a model's parts on a rank, in bytes, and the memory of each stage that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from megatron.schedules.schedule.kinds import Kind, Share

# Shares of a stage's activations, as in StageMemory.
_HELD = (Share.FORWARD, Share.WEIGHTS, Share.RECOMPUTED, Share.OFFLOADED)


class LayerMemory(NamedTuple):
    """Memory of one decoder layer for one microbatch, bytes.

    Args:
        full: activations from F to I without recompute.
        kept: activations from F to I if Megatron recomputes parts of the layer; otherwise ``full``.
        weights: activations from I to W.
        parameters: weights, gradients and optimizer state.
    """

    full: float
    kept: float
    weights: float
    parameters: float = 0.0


class EndMemory(NamedTuple):
    """Memory of the parts before or after the decoder layers, bytes. Fields as in :class:`LayerMemory`."""

    kept: float = 0.0
    weights: float = 0.0
    parameters: float = 0.0


class StageMemory(NamedTuple):
    """Memory of one stage for one microbatch, bytes.

    Args:
        forward: activations from F to I, without ``recomputed`` and ``offloaded``.
        weights: activations from I to W.
        recomputed: activations that R recomputes.
        offloaded: activations that O moves to the host.
        parameters: weights, gradients and optimizer state.
    """

    forward: float
    weights: float
    recomputed: float
    offloaded: float
    parameters: float


class Passing(NamedTuple):
    """Temporary memory of Megatron's own recompute in one backward pass, over what is held before it; bytes.

    Args:
        whole: during B.
        input_grad: during I.
    """

    whole: float = 0.0
    input_grad: float = 0.0


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a model's parts on one rank of its tensor- and context-parallel group.

    Args:
        layers: memory of each decoder layer.
        input: bytes of a decoder layer's input, which stays if the whole layer is recomputed.
        first, last: memory of the parts before and after the layers.
        mask: bytes of a microbatch's attention mask on the first and the last stage.
        vocabulary: activation bytes from S to T: on each rank, and in total on all ranks.
        recomputed_layers: number of layers, the first ones of each stage, that Megatron recomputes whole; None: all.
        together: number of these layers that are recomputed as one block and keep one input.
        of_device: whether a memory limit is what parameters leave of a device, see :class:`.StageCosts`.
    """

    layers: tuple[LayerMemory, ...]
    input: float
    first: EndMemory
    last: EndMemory
    mask: float = 0.0
    vocabulary: tuple[float, float] = (0.0, 0.0)
    recomputed_layers: int | None = 0
    together: int = 1
    of_device: bool = False

    def of_rank(self, ranks: int) -> float:
        """Unit of memory limits, bytes: one microbatch's activations of an average rank's layers, without recompute."""
        return sum(layer.full for layer in self.layers) / ranks

    @property
    def weight_share(self) -> float:
        """Activations of the layers from I to W, relative to those from F to I."""
        kept = sum(layer.kept for layer in self.layers)
        return sum(layer.weights for layer in self.layers) / kept if kept else 1.0

    def measured(
        self,
        layers: Sequence[float],
        weight_share: float,
        input: float,
        ends: tuple[float, float],
        vocabulary: tuple[float, float] | None = None,
        *,
        recomputed: bool,
    ) -> ModelMemory:
        """Returns this model with measured activations. Parameters and the rest do not change.

        Args:
            layers: bytes of each decoder layer from F to I.
            weight_share: bytes from I to W, relative to ``layers``.
            input: bytes of a layer's input.
            ends: bytes of the parts before and after the layers.
            vocabulary: bytes from S to T on each rank, and in total on all ranks; None if not measured.
            recomputed: whether Megatron's recompute was on, so that ``layers`` include its savings.
        """
        shares = [1.0 if recomputed else layer.kept / layer.full for layer in self.layers]
        first, last = ends
        return replace(
            self,
            layers=tuple(
                LayerMemory(held, share * held, weight_share * held, layer.parameters)
                for layer, share, held in zip(self.layers, shares, layers, strict=True)
            ),
            input=input,
            first=self.first._replace(kept=first),
            last=self.last._replace(kept=last),
            mask=0.0,
            vocabulary=self.vocabulary if vocabulary is None else vocabulary,
            recomputed_layers=0 if recomputed else self.recomputed_layers,
        )

    def on_stages(
        self, unit: float, counts: Sequence[int], recomputed: Sequence[float], offloaded: Sequence[float]
    ) -> dict[str, Any]:
        """Returns the fields of :class:`.StageCosts` about memory.

        Args:
            unit: memory of one microbatch on an average rank (:meth:`of_rank`), bytes.
            counts: number of decoder layers of each stage.
            recomputed, offloaded: part of each stage's layers that is recomputed by R, or offloaded.
        """
        saved = (
            [round(share * count) for share, count in zip(shares, counts, strict=True)]
            for shares in (recomputed, offloaded)
        )
        columns = zip(*self.by_stage(counts, *saved), strict=True)
        forward, weights, recompute, offload, standing = (tuple(size / unit for size in sizes) for sizes in columns)
        passing = self.passing(counts) if self.most_passing else ()
        return {
            "activation": tuple(map(sum, zip(forward, recompute, offload, strict=True))),
            "held": dict(zip(_HELD, (forward, weights, recompute, offload), strict=True)),
            "standing": standing if any(standing) else (),
            "of_device": self.of_device,
            "passing": {
                Kind.B: tuple(stage.whole / unit for stage in passing),
                Kind.I: tuple(stage.input_grad / unit for stage in passing),
            }
            if passing
            else {},
        }

    def by_stage(
        self, counts: Sequence[int], recomputed: Sequence[int] | None = None, offloaded: Sequence[int] | None = None
    ) -> list[StageMemory]:
        """Returns the memory of each stage.

        Args:
            counts: number of decoder layers of each stage, in model order.
            recomputed, offloaded: number of layers of each stage with an R, and with an O. Those with an O come first.
        """
        begins, none = accumulate(counts[:-1], initial=0), [0] * len(counts)
        stages = zip(begins, counts, recomputed or none, offloaded or none, strict=True)
        memory = [self._stage(*stage) for stage in stages]
        for stage in {0, len(counts) - 1}:
            # Other stages have no mask, or one for all microbatches.
            mask = self.mask if counts[stage] else 0.0
            memory[stage] = memory[stage]._replace(forward=memory[stage].forward + mask)
        for stage, end in ((0, self.first), (-1, self.last)):
            one = memory[stage]
            memory[stage] = one._replace(
                forward=one.forward + end.kept,
                weights=one.weights + end.weights,
                parameters=one.parameters + end.parameters,
            )
        return memory

    def by_layer(self, counts: Sequence[int]) -> list[list[float]]:
        """Returns the activations from F to I of each layer of each stage, with Megatron's own recompute."""
        begins = accumulate(counts, initial=0)
        return [self._kept(begin, count) for begin, count in zip(begins, counts, strict=False)]

    def passing(self, counts: Sequence[int]) -> list[Passing]:
        """Returns the temporary memory of each stage during its backward passes."""
        begins = accumulate(counts, initial=0)
        passing = [self._known_passing(begin, count) for begin, count in zip(begins, counts, strict=False)]
        # The parts after the last layer are freed before that layer is recomputed; in an I their operands of W stay.
        kept, weights, _ = self.last
        whole, input_grad = passing[-1]
        passing[-1] = Passing(max(0.0, whole - kept), max(0.0, input_grad - kept + weights))
        return passing

    @cached_property
    def most_passing(self) -> float:
        """Maximum temporary memory of a backward pass, over all stages and layer partitions, bytes."""
        whole = sorted((layer.full for layer in self.layers), reverse=True)[: self.together]
        parts = max((layer.full - layer.kept for layer in self.layers), default=0.0)
        return sum(whole) if self.recomputed_layers != 0 else parts

    def _stage(self, begin: int, count: int, recompute: int, offload: int) -> StageMemory:
        key = begin, count, recompute, offload
        if key not in self._known:
            forward = weights = recomputed = moved = parameters = 0.0
            for at, (layer, kept) in enumerate(
                zip(self.layers[begin : begin + count], self._kept(begin, count), strict=True)
            ):
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

    def _kept(self, begin: int, count: int) -> list[float]:
        kept = [layer.kept for layer in self.layers[begin : begin + count]]
        for at in range(min(len(kept), self._recomputed(count))):
            kept[at] = 0.0 if at % self.together else self.input
        return kept

    def _known_passing(self, begin: int, count: int) -> Passing:
        if (begin, count) not in self._passings:
            self._passings[begin, count] = self._passing(begin, count)
        return self._passings[begin, count]

    def _passing(self, begin: int, count: int) -> Passing:
        layers, recomputed = self.layers[begin : begin + count], self._recomputed(count)
        if not recomputed:
            return Passing(max((layer.full - layer.kept for layer in layers), default=0.0))
        most, kept = Passing(), self._kept(begin, count)
        for at in range(0, recomputed, self.together):
            # The block's input is a part of its first layer and is always kept.
            full = sum(layer.full for layer in layers[at : at + self.together]) - self.input
            # Later layers are freed before it; in an I their operands of W stay.
            freed = sum(kept[at + self.together :])
            left = sum(layer.weights for layer in layers[at + self.together :])
            most = Passing(max(most.whole, full - freed), max(most.input_grad, full - freed + left))
        return most

    def _recomputed(self, count: int) -> int:
        """Number of a stage's layers that Megatron recomputes whole."""
        return count if self.recomputed_layers is None else min(count, self.recomputed_layers)

    @cached_property
    def _known(self) -> dict[tuple[int, int, int, int], StageMemory]:
        """Cached sums. Searches request the same stages many times."""
        return {}

    @cached_property
    def _passings(self) -> dict[tuple[int, int], Passing]:
        """Cached temporary memory of stages, likewise."""
        return {}
