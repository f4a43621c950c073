"""Memory of each rank of a plan: weights, gradients, optimizer, activations, messages, and host memory.

Counts as in arXiv 1910.02054, section 3.1: in mixed precision 2 bytes a weight, 2 or 4 for its gradient and 12 for
Adam's state (a copy and two moments in single precision), which data-parallel ranks may share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import whole_peaks
from megatron.schedules.schedule.stage_costs import StageCosts

# Fraction of a device that no plan uses: for the CUDA context, buffers of NCCL and cuBLAS, and fragmentation.
RESERVED = 0.1
# Modules that Megatron can recompute separately, and their parts of a layer.
_MODULES: Mapping[str, tuple[str, ...]] = {"moe": ("router", "moe_act", "moe", "shared_experts")}


@dataclass(frozen=True)
class Numbers:
    """Bytes of each parameter.

    Args:
        weight, gradient, optimizer: bytes per parameter; of a weight only where it is not stored in FP8 alone.
        shared_by: ranks that share the optimizer state of dense parameters, and of experts'.
        on_host: share of the optimizer state on the host.
        copies: bytes of the quantized copies of a parameter.
    """

    weight: float
    gradient: float
    optimizer: float
    shared_by: tuple[int, int] = (1, 1)
    on_host: float = 0.0
    copies: float = 0.0

    def weights(self, count: Count) -> float:
        """Bytes of the weights on one rank, with their quantized copies."""
        return self.weight * (count.all - count.primary) + self.copies * count.quantized

    def state(self, count: Count) -> float:
        """Bytes of the optimizer state on one rank."""
        return self.optimizer * (count.dense / self.shared_by[0] + count.expert / self.shared_by[1])

    def held(self, count: Count) -> float:
        """Bytes that stay allocated on one rank's device."""
        return self.weights(count) + self.gradient * count.trained + (1 - self.on_host) * self.state(count)


@dataclass(frozen=True)
class Recompute:
    """Megatron's own recompute, which runs in I.

    Args:
        layers: number of layers of each stage, the first ones, that are recomputed whole; None for all.
        together: consecutive layers that keep one input.
        modules: recomputed modules of all layers, by Megatron's names.
    """

    layers: int | None = 0
    together: int = 1
    modules: tuple[str, ...] = ()

    @property
    def parts(self) -> frozenset[str]:
        """Parts of a layer that are recomputed."""
        return frozenset(part for module in self.modules for part in _MODULES.get(module, (module,)))


NOTHING = Recompute()


def model_memory(
    build: Build, tokens: float, recompute: Recompute = NOTHING, *, shared: bool = False, numbers: Numbers | None = None
) -> ModelMemory:
    """Memory of each part of ``build`` for one microbatch, for plans.

    Args:
        build: the model as built on its ranks.
        tokens: tokens of a microbatch on one rank.
        recompute: Megatron's own recompute.
        shared: true under vocabulary parallelism.
        numbers: bytes per parameter, if the plan must reserve memory for parameters; otherwise they count as 0.
    """
    kept, sizes = activations(build), parameters(build)

    def held(count: Count) -> float:
        return 0.0 if numbers is None else numbers.held(count)

    behind = kept.norm if shared else kept.last
    for layer_ahead in kept.ahead:
        behind = behind.plus(layer_ahead)
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


def usable(device: float) -> float:
    """Returns what a plan may use of a device with this many bytes."""
    return (1 - RESERVED) * device


class RankMemory(NamedTuple):
    """Memory of one pipeline rank in bytes, each sort at its peak.

    Args:
        weights, gradients, optimizer, activations, messages: bytes on the device.
        host: bytes on the host.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    messages: float = 0.0
    host: float = 0.0

    @property
    def static(self) -> float:
        """Bytes of weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of each sort on the device."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))

    @property
    def device(self) -> float:
        """Bytes on the device."""
        return sum(self[:-1])

    @property
    def largest(self) -> str:
        """The sort that uses most of the device."""
        return max(self.parts, key=lambda part: self.parts[part])

    @staticmethod
    def static_of(count: Count, numbers: Numbers, messages: float) -> RankMemory:
        """Returns a rank with ``count`` parameters, no activations, and ``messages`` bytes of messages."""
        state = numbers.state(count)
        return RankMemory(
            weights=numbers.weights(count),
            gradients=numbers.gradient * count.trained,
            optimizer=state * (1 - numbers.on_host),
            messages=messages,
            host=state * numbers.on_host,
        )


def memory(
    schedule: Schedule,
    costs: StageCosts,
    unit: float,
    sizes: Sequence[Count],
    numbers: Numbers,
    messages: Sequence[float],
) -> tuple[RankMemory, ...]:
    """Memory of each rank of ``schedule``.

    Args:
        schedule, costs: the plan and its costs.
        unit: bytes of one microbatch's activations on an average rank.
        sizes: parameters of each rank.
        numbers: bytes of each parameter.
        messages: bytes of each rank's messages.
    """
    held_by_rank, host = whole_peaks(schedule, costs), taken(schedule, costs)
    ranks = (RankMemory.static_of(count, numbers, waiting) for count, waiting in zip(sizes, messages, strict=True))
    return tuple(
        rank._replace(activations=unit * held, host=rank.host + unit * moved)
        for rank, held, moved in zip(ranks, held_by_rank, host, strict=True)
    )
