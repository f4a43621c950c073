"""Bytes that each rank of a plan holds: weights, gradients, optimizer, activations, messages, and those on its host.

Weights, gradients and Adam's state as arXiv 1910.02054 counts them in section 3.1: in mixed precision two bytes of a
weight, two or four of its gradient, and twelve of the optimizer (a copy and two moments in single precision), which
data-parallel ranks may share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parameters import Count, parameters
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory, activation_bytes
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

# Megatron's names for what it may recompute alone, and the parts of a layer that each stands for.
_MODULES: Mapping[str, tuple[str, ...]] = {"moe": ("router", "moe_act", "moe", "shared_experts")}


@dataclass(frozen=True)
class Numbers:
    """Bytes that each parameter takes.

    Args:
        weight, gradient: of those.
        optimizer: of its state.
        shared_by: how many ranks share the optimizer's state of dense parameters, and of experts'.
        on_host: the part of the optimizer's state that lies on the host.
    """

    weight: float
    gradient: float
    optimizer: float
    shared_by: tuple[int, int] = (1, 1)
    on_host: float = 0.0

    def state(self, count: Count) -> float:
        """Bytes of the optimizer's state on one rank."""
        return self.optimizer * (count.dense / self.shared_by[0] + count.expert / self.shared_by[1])

    def held(self, count: Count) -> float:
        """Bytes on the device all the time, of one rank."""
        return (self.weight + self.gradient) * count.all + (1 - self.on_host) * self.state(count)


@dataclass(frozen=True)
class Recompute:
    """What Megatron itself does again in I.

    Args:
        layers: of each stage, how many whole layers, the first ones; None for all.
        together: of these, how many keep one input among them.
        modules: parts of all layers, by Megatron's names for them.
    """

    layers: int | None = 0
    together: int = 1
    modules: tuple[str, ...] = ()

    @property
    def parts(self) -> frozenset[str]:
        """The parts of a layer that are done again."""
        return frozenset(part for module in self.modules for part in _MODULES.get(module, (module,)))


NOTHING = Recompute()


def model_memory(
    build: Build, tokens: float, recompute: Recompute = NOTHING, *, shared: bool = False, numbers: Numbers | None = None
) -> ModelMemory:
    """What the parts of ``build`` keep of a microbatch, for plans.

    Args:
        build: the model as its ranks have it.
        tokens: of a microbatch on one rank.
        recompute: what Megatron recomputes.
        shared: whether all pipeline ranks share the embedding and the output layer.
        numbers: bytes of a parameter, where a plan has to make room for unequal shares of them; else they count as 0.
    """
    kept, sizes = activations(build), parameters(build)

    def held(count: Count) -> float:
        return 0.0 if numbers is None else numbers.held(count)

    behind = kept.norm if shared else kept.last
    for _ in range(build.shape.ahead):
        behind = behind.plus(kept.ahead)
    first, last, alone, together = sizes.first, sizes.last.plus(sizes.ahead), *kept.words
    if not shared:
        first, last = first.plus(sizes.table), last.plus(sizes.table)
    return ModelMemory(
        layers=tuple(
            LayerMemory(
                tokens * whole(layer).forward,
                tokens * whole(layer, recompute.parts).forward,
                tokens * whole(layer).weights,
                held(count),
            )
            for layer, count in zip(kept.layers, sizes.layers, strict=True)
        ),
        input=tokens * kept.input,
        first=EndMemory(tokens * kept.first.forward, 0.0, held(first)),
        last=EndMemory(tokens * behind.forward, tokens * behind.weights, held(last)),
        mask=tokens * kept.mask,
        vocabulary=(tokens * alone, tokens * together) if shared else (0.0, 0.0),
        recomputed_layers=recompute.layers,
        together=recompute.together,
    )


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank; those on the host are not the device's.

    Args:
        weights, gradients, optimizer, activations, messages, host: of each sort, the most at once.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    messages: float = 0.0
    host: float = 0.0

    @property
    def static(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of each sort on the device."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))

    @property
    def device(self) -> float:
        """All on the device."""
        return sum(self[:-1])

    @property
    def largest(self) -> str:
        """The sort that takes most of the device."""
        return max(self.parts, key=lambda part: self.parts[part])

    @staticmethod
    def static_of(count: Count, numbers: Numbers, messages: float) -> RankMemory:
        """A rank without activations.

        Args:
            count: its parameters.
            numbers: bytes of each of them.
            messages: bytes of its messages at most.
        """
        state = numbers.state(count)
        return RankMemory(
            weights=numbers.weight * count.all,
            gradients=numbers.gradient * count.all,
            optimizer=state * (1 - numbers.on_host),
            messages=messages,
            host=state * numbers.on_host,
        )


def memory(
    schedule: Schedule,
    costs: StageCosts,
    model: ModelMemory,
    counts: Sequence[int],
    sizes: Sequence[Count],
    numbers: Numbers,
    messages: Sequence[float],
) -> tuple[RankMemory, ...]:
    """What each rank of ``schedule`` holds.

    Args:
        schedule, costs: the plan and what it was made for.
        model: what ``costs`` were made of.
        counts: decoder layers of each stage.
        sizes: parameters of each rank.
        numbers: bytes of each of them.
        messages: bytes of each rank's messages at most.
    """
    unit, host = model.of_rank(schedule.ranks), taken(schedule, costs)
    activations = activation_bytes(schedule, costs, model, counts)
    ranks = (RankMemory.static_of(count, numbers, waiting) for count, waiting in zip(sizes, messages, strict=True))
    return tuple(
        rank._replace(activations=held, host=rank.host + unit * away)
        for rank, held, away in zip(ranks, activations, host, strict=True)
    )
