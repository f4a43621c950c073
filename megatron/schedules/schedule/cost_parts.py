"""Parts of costs: times of layers, memory of layers in shares, latency of links, and copies to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.model_loads import Load, Part
from megatron.schedules.utils.errors import PlanError

# Largest weight_share. No linear layer's W needs so much more memory than its I, so a larger value is a mistake.
MOST_SHARE = 100
# Part of a layer's activations that is its input: 2 of some 34 bytes per token and hidden unit.
LAYER_INPUT = 0.06
# Bounds of times. Sums of their products stay far from the limits of a float.
_LEAST, _MOST = 1e-100, 1e100

_ByKind = dict[Kind, tuple[float, ...]]


def _check_time(time: float, what: str, about: str, *, zero: bool) -> None:
    """Raises PlanError if a time is out of bounds, or if it is zero where a pass must take time."""
    if fault := _fault([time], "zero or a positive number" if zero else "a positive number", zero=zero):
        raise PlanError(f"{what} must be {fault}, not {time:g}", about)


def _check_share(share: float, what: str, about: str, most: float = 1) -> None:
    """Raises PlanError if a share is not from 0 to ``most``."""
    if not 0 <= share <= most:
        raise PlanError(f"the share of {what} must be from 0 to {most}, not {share:g}", about)


def _fault(times: Iterable[float], what: str, *, zero: bool) -> str:
    """Requirement that one of ``times`` breaks: ``what``, or the bounds. Empty if all are valid."""
    wrong = [time for time in times if not (_LEAST <= time <= _MOST or (zero and time == 0))]
    if any(0 < time < math.inf for time in wrong):
        return f"from {_LEAST:g} to {_MOST:g}"
    return what if wrong else ""


@dataclass(frozen=True)
class LayerTimes:
    """Times of half a rank's decoder layers, all in one unit of your choice.

    With c chunks per rank a stage of average layers takes 2/c of these times, so every placement does the same work.

    Args:
        forward, input_grad, weight_grad: times of F, I (the paper's B) and W without recompute.
        messages: parts of ``forward`` and of ``input_grad`` in which a rank waits for messages of its experts. Weight
            gradients may run meanwhile (:mod:`.hidden_messages`).
        attention: attention's shares of F and I, which grow with the square of the sequence length
            (:mod:`.stage_costs`).
        stock_recompute: share of F that Megatron's own recompute repeats inside I.
        recomputed_layers: number of the first layers of each stage that ``stock_recompute`` is for; None for all.
        recompute_time: time of R relative to F.
        splitting: price of a split backward: time by which I and W together exceed a whole backward.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    messages: tuple[float, float] = (0.0, 0.0)
    attention: tuple[float, float] = (0.0, 0.0)
    stock_recompute: float = 0.0
    recomputed_layers: int | None = None
    recompute_time: float = 1.0
    splitting: float = 0.0

    def __post_init__(self) -> None:
        if fault := _fault(self.passes, "positive numbers", zero=False):
            raise PlanError(f"costs F,I,W must be {fault}, not {','.join(f'{t:g}' for t in self.passes)}", "costs")
        _check_share(self.stock_recompute, "the forward that is recomputed", "stock_recompute")
        _check_time(self.recompute_time, "the time of a recompute pass", "costs", zero=False)
        if not 0 <= self.splitting < self.input_grad + self.weight_grad:
            raise PlanError(
                f"the price of a split backward must be zero or positive, and less than I and W, not "
                f"{self.splitting:g}",
                "costs",
            )
        for message, name, whole in zip(self.messages, "FI", self.passes, strict=False):
            if not 0 <= message <= whole:
                raise PlanError(
                    f"messages of experts must take from 0 to {whole:g}, the time of {name} that they are part of, "
                    f"not {message:g}",
                    "costs",
                )

    @property
    def passes(self) -> tuple[float, float, float]:
        """Times of F, I and W."""
        return self.forward, self.input_grad, self.weight_grad

    def scaled(self, scale: Callable[[float], float]) -> LayerTimes:
        """Returns these times in another unit."""
        forward, input_grad, weight_grad = map(scale, self.passes)
        messages, splitting = (scale(self.messages[0]), scale(self.messages[1])), scale(self.splitting)
        return replace(
            self,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            messages=messages,
            splitting=splitting,
        )

    def repeated(self, counts: Sequence[int]) -> list[float]:
        """Returns the share of F that Megatron's own recompute repeats in I, for stages of so many layers."""
        if (first := self.recomputed_layers) is None:
            return [self.stock_recompute] * len(counts)
        return [self.stock_recompute * min(count, first) / max(count, 1) for count in counts]

    def saved_by_wholes(self, one: float, layers: Sequence[Load]) -> tuple[float, ...]:
        """Returns the price of a split backward on each stage; empty without.

        Args:
            one, layers: as in :meth:`on_stages`.
        """
        if not self.splitting:
            return ()
        share = self.splitting / (self.input_grad + self.weight_grad)
        return tuple(
            one * share * (self.input_grad * load.input_grad + self.weight_grad * load.weight_grad) for load in layers
        )

    def on_stages(self, one: float, layers: Sequence[Load], ends: Sequence[Load], repeated: Sequence[float]) -> _ByKind:
        """Returns the times of F, I, W and R on each stage.

        Args:
            one: an average layer as a multiple of half a rank's layers.
            layers: load of each stage's layers, in average layers.
            ends: load of the parts before and after the layers, which run their whole backward in I.
            repeated: see :meth:`repeated`.
        """
        forward, input_grad, weight_grad = self.passes
        stages = list(zip(layers, ends, repeated, strict=True))
        whole = [input_grad * end.input_grad + weight_grad * end.weight_grad for end in ends]
        split = [(input_grad + again * forward) * load.input_grad for load, _, again in stages]
        return {
            Kind.F: tuple(one * (forward * load.forward + forward * end.forward) for load, end, _ in stages),
            Kind.I: tuple(one * (layer + end) for layer, end in zip(split, whole, strict=True)),
            Kind.W: tuple(one * (weight_grad * load.weight_grad) for load in layers),
            Kind.R: tuple(one * (self.recompute_time * forward * load.forward) for load in layers),
        }

    def of_layers(
        self,
        one: float,
        layers: Sequence[Load],
        amounts: tuple[Sequence[float] | None, Sequence[float] | None],
        recomputed: Sequence[float] | None,
        repeated: Sequence[float],
    ) -> tuple[_ByKind, _ByKind]:
        """Returns attention's part, and that of messages of experts, of the F, I and R of each stage; empty without.

        Only decoder layers have them.

        Args:
            one, layers, repeated: see :meth:`on_stages`.
            amounts: attention, and messages of experts, of each stage in those of an average layer; None if layers have
                them in proportion to their time.
            recomputed: part of each stage's layers that is recomputed by R; None without R.
        """
        if not any(self.attention + self.messages):
            return {}, {}

        def times(loads: Sequence[Load]) -> _ByKind:
            by_kind = self.on_stages(one, loads, [Load()] * len(loads), repeated)
            again = zip(recomputed or (), by_kind[Kind.R], strict=False)
            rest = {Kind.R: tuple(share * time for share, time in again)} if recomputed else {}
            return {Kind.F: by_kind[Kind.F], Kind.I: by_kind[Kind.I], **rest}

        whole = times(layers)

        def parts(shares: Callable[[float], Mapping[Kind, float]], of_stages: Sequence[float] | None) -> _ByKind:
            of = [shares(again) for again in repeated]
            spread = whole if of_stages is None else times([Load(amount, amount, amount) for amount in of_stages])
            return {
                # Given costs may have more than the layers that have it.
                kind: tuple(
                    min(share[kind] * time, most) for share, time, most in zip(of, by_stage, whole[kind], strict=True)
                )
                for kind, by_stage in spread.items()
            }

        attention = parts(self._attention, amounts[0]) if any(self.attention) else {}
        return attention, parts(self._messages, amounts[1]) if any(self.messages) else {}

    def _attention(self, again: float) -> dict[Kind, float]:
        """Attention's share of F, I and R of a layer whose I repeats the part ``again`` of F."""
        forward, input_grad = self.attention
        repeated = again * self.forward
        both = input_grad * self.input_grad + forward * repeated
        return {Kind.F: forward, Kind.I: both / (self.input_grad + repeated), Kind.R: forward}

    def _messages(self, again: float) -> dict[Kind, float]:
        """Share of F, I and R of such a layer in which it waits for messages of experts."""
        forward, input_grad = self.messages
        both = input_grad + again * forward
        return {
            Kind.F: forward / self.forward,
            Kind.I: both / (self.input_grad + again * self.forward),
            Kind.R: min(1.0, forward / (self.recompute_time * self.forward)),
        }


class MemoryShares(Struct, frozen=True, array_like=True):  # JSON tells a list from the object with a model's bytes
    """Activation memory of decoder layers, relative to their activations without recompute.

    Args:
        weight_share: activations from I to W. May exceed 1, since I makes gradients for W.
        kept: activations that F keeps under Megatron's own recompute.
        layer_input: activations that stay if an R pass recomputes the layer.
    """

    weight_share: float = 1.0
    kept: float = 1.0
    layer_input: float = LAYER_INPUT

    def __post_init__(self) -> None:
        _check_share(self.weight_share, "memory held until W", "weight_share", MOST_SHARE)
        _check_share(self.layer_input, "memory that is a layer's input", "layer_input")
        _check_share(self.kept, "memory kept for recomputing", "kept")

    def on_stages(
        self, unit: float, parts: Sequence[Part], recomputed: Sequence[float], offloaded: Sequence[float]
    ) -> dict[str, Any]:
        """Returns the fields of :class:`.StageCosts` about memory.

        The embedding and the output layer recompute nothing and leave nothing to W.

        Args:
            unit: load of one microbatch on an average rank.
            parts: load of each stage.
            recomputed, offloaded: part of each stage's layers that is recomputed by R, or offloaded.
        """
        activation = tuple(part.held / unit for part in parts)
        layers = tuple(part.split.held / unit for part in parts)
        by_recompute = tuple(
            share * max(0.0, self.kept - self.layer_input) * held
            for share, held in zip(recomputed, layers, strict=True)
        )
        by_offload = tuple(share * self.kept * held for share, held in zip(offloaded, layers, strict=True))
        stays = zip(activation, layers, by_recompute, by_offload, strict=True)
        held = {
            Share.FORWARD: tuple(max(0.0, all - (1 - self.kept) * some - r - o) for all, some, r, o in stays),
            Share.WEIGHTS: tuple(self.weight_share * held for held in layers),
            Share.RECOMPUTED: by_recompute,
            Share.OFFLOADED: by_offload,
        }
        return {"activation": activation, "held": held}


@dataclass(frozen=True)
class Link:
    """P2P latency between two ranks, in the unit of the passes.

    Args:
        latency: that of every pair of ranks which is not in ``pairs``.
        pairs: (from, to, latency).
    """

    latency: float = 0.0
    pairs: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for latency in self.latencies:
            _check_time(latency, "the P2P latency", "costs", zero=True)

    @property
    def latencies(self) -> list[float]:
        """All latencies."""
        return [self.latency, *(latency for _, _, latency in self.pairs)]

    def scaled(self, scale: Callable[[float], float]) -> Link:
        """Returns these latencies in another unit."""
        return Link(scale(self.latency), tuple((source, to, scale(latency)) for source, to, latency in self.pairs))


@dataclass(frozen=True)
class HostCopies:
    """Copies of activations to the host (O) and back (L).

    Args:
        time: time to copy the activations of half a rank's layers in one direction, in the unit of the passes; 0 if
            unknown.
        one_way: whether a rank copies in one direction at a time.
    """

    time: float = 0.0
    one_way: bool = False

    def __post_init__(self) -> None:
        _check_time(self.time, "the time of a copy", "copy", zero=True)

    def scaled(self, scale: Callable[[float], float]) -> HostCopies:
        """Returns the same copies with their time in another unit."""
        return HostCopies(scale(self.time), self.one_way)
