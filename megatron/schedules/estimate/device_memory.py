"""Bytes that each rank of a plan holds: weights, gradients, optimizer, activations, messages, and those on its host.

Weights, gradients and Adam's state as arXiv 1910.02054 counts them in section 3.1: in mixed precision two bytes of a
weight, two or four of its gradient, and twelve of the optimizer (a copy and two moments in single precision), which
data-parallel ranks may share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron.schedules.estimate.activations import Activations, Kept, whole
from megatron.schedules.estimate.parameters import Count
from megatron.schedules.planning.host import taken
from megatron.schedules.planning.kinds import Kind, Share
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.stage_costs import StageCosts

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


@dataclass(frozen=True)
class Held:
    """What each stage of a plan keeps.

    Args:
        kept: every part of the model, in bytes for a token.
        tokens: of a microbatch on one rank.
        counts: decoder layers of each stage.
        ahead: layers of multi-token prediction.
        again, away: of each stage's layers, how many have an R, and how many an O; the latter are the first ones.
        recompute: what is done again beside the plan.
        shared: whether all ranks share the embedding and the output layer.
    """

    kept: Activations
    tokens: float
    counts: tuple[int, ...]
    ahead: int = 0
    again: tuple[int, ...] | None = None
    away: tuple[int, ...] | None = None
    recompute: Recompute = Recompute()
    shared: bool = False

    def on(self, costs: StageCosts, ranks: int, last_of_rank: Sequence[int]) -> StageCosts:
        """``costs`` with bytes for what stages hold, in place of shares of an average rank's."""
        stages = range(len(self.counts))
        forward, weights, again, away = (
            tuple(self.tokens * each for each in column)
            for column in zip(*(self._stage(stage) for stage in stages), strict=True)
        )
        alone, together = self.kept.words
        words = self.tokens * (alone + together / ranks) if self.shared else 0.0
        shared = tuple(words if stage in last_of_rank else 0.0 for stage in stages)
        held = {
            Share.FORWARD: forward,
            Share.WEIGHTS: weights,
            Share.VOCABULARY: shared,
            Share.AGAIN: again,
            Share.AWAY: away,
        }
        return replace(costs, activation=tuple(map(sum, zip(forward, again, away, strict=True))), held=held)

    def passing(self) -> tuple[tuple[float, float], ...]:
        """By stage, bytes that are there for a moment in B, and in I, where Megatron does layers again.

        Whatever is done again together is there as a whole.
        """
        found = []
        begin = 0
        for count in self.counts:
            layers = self.kept.layers[begin : begin + count]
            begin += count
            most = Kept()
            for at in range(self._done_again(count)):
                block = _sum(whole(layer) for layer in layers[at : at + self.recompute.together])
                most = max(most, block)
            if not self._done_again(count) and self.recompute.parts:
                for layer in layers:
                    parts = sum(part.forward for name, part in layer.items() if name in self.recompute.parts)
                    most = max(most, Kept(parts, parts))
            found.append((self.tokens * most.forward, self.tokens * max(0.0, most.forward - most.weights)))
        # What stands behind the last layer is gone before that is done again.
        behind = self.tokens * self._behind.forward
        found[-1] = (max(0.0, found[-1][0] - behind), found[-1][1])
        return tuple(found)

    @property
    def _behind(self) -> Kept:
        """What stands behind the decoder layers, on the last stage."""
        found = self.kept.norm if self.shared else self.kept.last
        for _ in range(self.ahead):
            found = found.plus(self.kept.ahead)
        return found

    def _done_again(self, count: int) -> int:
        """How many of a stage's layers Megatron does again as a whole."""
        return count if self.recompute.layers is None else min(count, self.recompute.layers)

    def _stage(self, stage: int) -> tuple[float, float, float, float]:
        """For a token: kept from F to I, from I to W, until R, and until O."""
        begin, count = sum(self.counts[:stage]), self.counts[stage]
        layers = self.kept.layers[begin : begin + count]
        off = 0 if self.away is None else self.away[stage]
        redo = 0 if self.again is None else self.again[stage]
        by_megatron = self._done_again(count)
        forward = weights = again = away = 0.0
        for at, layer in enumerate(layers):
            full = whole(layer)
            weights += full.weights
            kept = whole(layer, self.recompute.parts).forward
            if at < by_megatron:
                kept = 0.0 if at % self.recompute.together else self.kept.input
            if at < off:
                away += kept
            elif at < off + redo:
                forward += self.kept.input
                again += kept - self.kept.input
            else:
                forward += kept
        if layers:
            forward += self.kept.mask
        if stage == 0:
            forward += self.kept.first.forward
        if stage == len(self.counts) - 1:
            forward += self._behind.forward
            weights += self._behind.weights
        return forward, weights, again, away


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank; those on the host are not the device's.

    Args:
        weights, gradients, optimizer, activations, messages, host: of each sort, the most at once.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    host: float

    @property
    def static(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        """All on the device."""
        return self.static + self.activations + self.messages


def memory(
    schedule: Schedule,
    costs: StageCosts,
    held: Held,
    parameters: Sequence[Count],
    numbers: Numbers,
    messages: Sequence[float],
) -> tuple[RankMemory, ...]:
    """What each rank of ``schedule`` holds.

    Args:
        schedule, costs: the plan and what it was made for.
        held: what its stages keep.
        parameters: of each rank.
        numbers: bytes of each of them.
        messages: bytes of each rank's messages at most.
    """
    placement = schedule.placement
    in_bytes = held.on(costs, schedule.ranks, [placement.stages_of(rank)[-1] for rank in range(schedule.ranks)])
    host, passing = taken(schedule, in_bytes), held.passing()
    found = []
    for rank, (count, waiting) in enumerate(zip(parameters, messages, strict=True)):
        state = numbers.state(count)
        found.append(
            RankMemory(
                weights=numbers.weight * count.all,
                gradients=numbers.gradient * count.all,
                optimizer=state * (1 - numbers.on_host),
                activations=_most(schedule, in_bytes, passing, rank),
                messages=waiting,
                host=host[rank] + state * numbers.on_host,
            )
        )
    return tuple(found)


def _most(schedule: Schedule, costs: StageCosts, passing: Sequence[tuple[float, float]], rank: int) -> float:
    """The most that ``rank`` holds at once, with what is there for a moment while a backward runs."""
    row = schedule.order[rank]
    changes = costs.changes_of(row)
    most = before = 0.0
    for (stage, kind, _), after in zip(row, accumulate(changes), strict=True):
        whole_backward, half = passing[stage]
        beside = {Kind.B: whole_backward, Kind.I: half}.get(kind, 0.0)
        most = max(most, before + beside, after + (beside if kind is Kind.I else 0.0))
        before = after
    return most


def _sum(parts: Iterable[Kept]) -> Kept:
    found = Kept()
    for part in parts:
        found = found.plus(part)
    return found
