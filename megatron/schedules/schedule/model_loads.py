"""Loads: what each part of a model costs, and which stage has which parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.schedules.utils.errors import PlanError


class Load(NamedTuple):
    """What one microbatch costs somewhere. Units are anyone's, the same throughout a model.

    Args:
        forward, input_grad, weight_grad: times.
        held: activation memory, from the start of F on.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    held: float = 0.0

    def plus(self, other: Load, times: int = 1) -> Load:
        """Both together, or this and several of the other."""
        return Load(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def over(self, mean: Load) -> Load:
        """As multiples of ``mean``."""
        return Load(
            self.forward / mean.forward,
            self.input_grad / mean.input_grad,
            self.weight_grad / mean.weight_grad,
            self.held / mean.held,
        )


class Part(NamedTuple):
    """What no two stages share: an embedding, a decoder layer, an output layer with its loss.

    Args:
        split: what of it may recompute its forward, and leaves weight gradients to W: layers.
        whole: what does neither, and computes its whole backward in I: embedding, output layer.
    """

    split: Load = Load()
    whole: Load = Load()

    def plus(self, other: Part, times: int = 1) -> Part:
        """Both together, or this and several of the other."""
        return Part(self.split.plus(other.split, times), self.whole.plus(other.whole, times))

    @property
    def held(self) -> float:
        """All activation memory."""
        return self.split.held + self.whole.held


@dataclass(frozen=True)
class ModelLoads:
    """A model, part by part.

    Args:
        first: what stands before the decoder layers, on the first stage.
        layers: each decoder layer.
        last: what stands after them, on the last stage.
        stand_in: how many layers the first and the last stand in for where layers are spread evenly.
        kept_for_output: activation memory that waits for the output layer's weight gradient where all ranks share its
            vocabulary: what each of them keeps, and what they keep together.
    """

    first: Part
    layers: tuple[Part, ...]
    last: Part
    stand_in: tuple[int, int] = (0, 0)
    kept_for_output: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.layers or min(self.mean) <= 0:
            raise PlanError("a model has one decoder layer or more, which take time and memory")

    @cached_property
    def mean(self) -> Load:
        """The average decoder layer; costs are given for it."""
        total = self._of(0, len(self.layers)).split
        return Load(*(each / len(self.layers) for each in total))

    @cached_property
    def without_output(self) -> ModelLoads:
        """The same, its output layer done and its vocabulary held by all ranks together.

        Raises:
            PlanError: where there is more behind the layers.
        """
        if any(self.last.split):
            raise PlanError(
                "the vocabulary cannot be shared with multi-token prediction, which uses the output layer too",
                "shared_vocabulary",
            )
        return replace(self, last=Part())

    def in_layers(self, load: Load) -> Load:
        """``load`` as multiples of the average layer."""
        if load not in self._multiples:
            self._multiples[load] = load.over(self.mean)
        return self._multiples[load]

    @cached_property
    def _multiples(self) -> dict[Load, Load]:
        """What was divided before: searches ask for the same again and again."""
        return {}

    def held_by_one_of(self, ranks: int) -> float:
        """What an average rank's decoder layers hold of a microbatch."""
        return self.mean.held * len(self.layers) / ranks

    def by_stage(self, counts: Sequence[int]) -> list[Part]:
        """What each stage has where it has so many of the layers."""
        found, begin = [], 0
        for count in counts:
            found.append(self._of(begin, begin + count))
            begin += count
        if begin != len(self.layers):
            raise PlanError(f"the stages have {begin} layers, and the model {len(self.layers)}", "layers")
        found[0] = found[0].plus(self.first)
        found[-1] = found[-1].plus(self.last)
        return found

    def evenly(self, stages: int) -> tuple[int, ...]:
        """How many layers each stage has where they are spread as evenly as whole ones go."""
        return even(len(self.layers), stages, self.stand_in)

    @property
    def ratio(self) -> tuple[float, float, float]:
        """F, I and W of the average layer, where F is 1."""
        return 1.0, self.mean.input_grad / self.mean.forward, self.mean.weight_grad / self.mean.forward

    def _of(self, begin: int, end: int) -> Part:
        """Layers from ``begin`` up to ``end``."""
        if (begin, end) not in self._known:
            total = Part()
            for part, times in _runs(self.layers[begin:end]):
                total = total.plus(part, times)
            self._known[begin, end] = total
        return self._known[begin, end]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Part]:
        """What has been added up before: searches ask for the same again and again."""
        return {}


def even(layers: int, stages: int, stand_in: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """How many of ``layers`` each stage has where they are spread as evenly as whole layers go.

    Args:
        layers: of the model.
        stages: that have them.
        stand_in: how many layers what stands before them and what stands after them count as.
    """
    before, after = stand_in
    counted = layers + before + after
    counts = [(stage + 1) * counted // stages - stage * counted // stages for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    if min(counts) < 0:
        raise PlanError(f"{layers} layers are too few for {stages} stages", "layers")
    return tuple(counts)


def _runs(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Equal neighbours, counted: a model has few sorts of layers."""
    found: list[tuple[Part, int]] = []
    for part in parts:
        if found and found[-1][0] == part:
            found[-1] = part, found[-1][1] + 1
        else:
            found.append((part, 1))
    return found
