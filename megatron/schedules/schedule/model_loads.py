"""Loads: relative costs of a model's parts, and the parts of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron.schedules.utils.errors import PlanError


class Load(NamedTuple):
    """Time and activation memory of one microbatch. Units are arbitrary but the same for a whole model.

    Args:
        forward, input_grad, weight_grad: times of F, I and W.
        held: activation memory from the start of F.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    held: float = 0.0

    def plus(self, other: Load, times: int = 1) -> Load:
        """Returns the sum of this load and ``times`` the other."""
        return Load(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def over(self, mean: Load) -> Load:
        """Returns this load as multiples of ``mean``."""
        return Load(*(mine / its for mine, its in zip(self, mean, strict=True)))


class Part(NamedTuple):
    """Load of an indivisible part of a model: an embedding, a decoder layer, or an output layer with its loss.

    Args:
        split: load of layers, which can be recomputed and leave their weight gradients to W.
        whole: load of embedding and output layer, which are not recomputed and run their whole backward in I.
    """

    split: Load = Load()
    whole: Load = Load()

    def plus(self, other: Part, times: int = 1) -> Part:
        """Returns the sum of this part and ``times`` the other."""
        return Part(self.split.plus(other.split, times), self.whole.plus(other.whole, times))

    @property
    def held(self) -> float:
        """Total activation memory."""
        return self.split.held + self.whole.held


@dataclass(frozen=True)
class ModelLoads:
    """Loads of a model's decoder layers and of its two ends, all in one unit of your choice.

    Args:
        first: load before the decoder layers, on the first stage.
        layers: load of each decoder layer.
        last: load after the decoder layers, on the last stage.
        stand_in: number of layers that ``first`` and ``last`` count as in an even layer partition.
        ends: number of layers of the first and of the last stage; None: as many as the other stages have.
        kept_for_output: activation memory until the output layer's weight gradient under vocabulary parallelism: on
            each rank, and in total on all ranks.
        shared_vocabulary: whether all ranks share the output layer (vocabulary parallelism), with S and T passes.
        attention, messages: for each decoder layer its attention, and its messages of experts, in those of an average
            layer; empty if layers have them in proportion to their time.
        block: number of layers that are as a GPT's block. Searches for a layer partition move so many at once at first.
        divisible: whether the number of layers is unknown. The one in ``layers`` then stands for any number of equal
            layers, with nothing before and after them.
    """

    first: Part
    layers: tuple[Part, ...]
    last: Part
    stand_in: tuple[int, int] = (0, 0)
    ends: tuple[int | None, int | None] = (None, None)
    kept_for_output: tuple[float, float] = (0.0, 0.0)
    shared_vocabulary: bool = False
    attention: tuple[float, ...] = ()
    messages: tuple[float, ...] = ()
    block: int = 1
    divisible: bool = False

    def __post_init__(self) -> None:
        if not self.layers or min(self.mean) <= 0:
            raise PlanError("a model has one decoder layer or more, which take time and memory")
        if self.divisible and self.shared_vocabulary:
            raise PlanError(
                "to share the vocabulary takes the model, which says what an output layer costs", "shared_vocabulary"
            )

    def on_stages(self, stages: int) -> ModelLoads:
        """Returns these loads; if the number of layers is unknown, with a layer on each of ``stages`` stages."""
        if not self.divisible:
            return self
        if stages not in self._divided:
            self._divided[stages] = replace(self, layers=self.layers * stages, divisible=False)
        return self._divided[stages]

    @cached_property
    def _divided(self) -> dict[int, ModelLoads]:
        """Cached results. Searches request the same number of stages many times."""
        return {}

    @cached_property
    def mean(self) -> Load:
        """Load of the average decoder layer, which costs refer to."""
        total = self._of(0, len(self.layers)).split
        return Load(*(amount / len(self.layers) for amount in total))

    @cached_property
    def without_output(self) -> ModelLoads:
        """This model without its output layer, which all ranks share (vocabulary parallelism).

        Raises:
            PlanError: if multi-token prediction uses the output layer, too.
        """
        if any(self.last.split):
            raise PlanError(
                "the vocabulary cannot be shared with multi-token prediction, which uses the output layer too",
                "shared_vocabulary",
            )
        return replace(self, last=Part())

    def in_layers(self, load: Load) -> Load:
        """Returns ``load`` in multiples of the average decoder layer, the same in any unit."""
        if load not in self._multiples:
            self._multiples[load] = Load(*map(without_noise, load.over(self.mean)))
        return self._multiples[load]

    @cached_property
    def _multiples(self) -> dict[Load, Load]:
        """Cached results. Searches request the same loads many times."""
        return {}

    def held_by_one_of(self, ranks: int) -> float:
        """Returns the activation memory of an average rank's decoder layers for one microbatch."""
        return self.mean.held * len(self.layers) / ranks

    def by_stage(self, counts: Sequence[int]) -> list[Part]:
        """Returns the load of each stage, given its number of layers."""
        parts, begin = [], 0
        for count in counts:
            parts.append(self._of(begin, begin + count))
            begin += count
        if begin != len(self.layers):
            raise PlanError(f"the stages have {begin} layers, and the model {len(self.layers)}", "layers")
        parts[0] = parts[0].plus(self.first)
        parts[-1] = parts[-1].plus(self.last)
        return parts

    def on_each_stage(self, of_layers: Sequence[float], counts: Sequence[int]) -> list[float] | None:
        """Returns the sum of :attr:`attention` or :attr:`messages` on each stage; None if they are empty."""
        if not of_layers:
            return None
        begins = accumulate(counts, initial=0)
        return [sum(of_layers[begin : begin + count]) for begin, count in zip(begins, counts, strict=False)]

    def evenly(self, stages: int) -> tuple[int, ...]:
        """Returns the number of layers of each stage in the most even layer partition."""
        return even(len(self.layers), stages, self.stand_in, self.ends)

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Times F, I and W of the average layer, relative to F."""
        return 1.0, self.mean.input_grad / self.mean.forward, self.mean.weight_grad / self.mean.forward

    def _of(self, begin: int, end: int) -> Part:
        """Load of the layers from ``begin`` up to, without, ``end``."""
        if (begin, end) not in self._known:
            total = Part()
            for part, times in _runs(self.layers[begin:end]):
                total = total.plus(part, times)
            self._known[begin, end] = total
        return self._known[begin, end]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Part]:
        """Cached sums. Searches request the same layers many times."""
        return {}


def without_noise(ratio: float) -> float:
    """Returns ``ratio`` in 10 digits, so that it is the same number whatever unit its two terms were rounded in.

    The small factor keeps ratios such as 1025 / 1024 from being halfway between two results.
    """
    return float(f"{ratio * (1 + 1e-12):.10g}")


def even(
    layers: int,
    stages: int,
    stand_in: tuple[int, int] = (0, 0),
    ends: tuple[int | None, int | None] = (None, None),
) -> tuple[int, ...]:
    """Returns the number of layers of each stage in the most even layer partition.

    Args:
        stand_in: number of layers that the parts before and after the decoder layers count as.
        ends: number of layers of the first and of the last stage; None: as many as the other stages have.
    """
    if ends != (None, None):
        first, last = ([] if count is None else [count] for count in ends)
        between = stages - len(first + last)
        left = layers - sum(first + last)
        if left < 0 or (left and between < 1):
            named = zip(("first", "last"), ends, strict=True)
            told = " and ".join(f"{count} on the {end}" for end, count in named if count is not None)
            end = "last_layers" if ends[0] is None else "first_layers"
            raise PlanError(f"{layers} layers do not divide over {stages} stages with {told}", end)
        return (*first, *(even(left, between) if between > 0 else ()), *last)
    before, after = stand_in
    counted = layers + before + after
    counts = [(stage + 1) * counted // stages - stage * counted // stages for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    if min(counts) < 0:
        raise PlanError(f"{layers} layers are too few for {stages} stages", "layers")
    return tuple(counts)


def _runs(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Runs of equal parts with their lengths. A model has few sorts of layers."""
    runs: list[tuple[Part, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part:
            runs[-1] = part, runs[-1][1] + 1
        else:
            runs.append((part, 1))
    return runs


# Any number of equal layers, for pipelines whose model is unknown.
EQUAL = ModelLoads(Part(), (Part(split=Load(1.0, 1.0, 1.0, 1.0)),), Part(), divisible=True)
