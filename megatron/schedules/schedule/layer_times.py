"""Times of decoder layers, and the parts of them that are attention, messages or Megatron's own recompute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load
from megatron.schedules.utils.errors import PlanError

# Bounds of times. Sums of their products stay far from the limits of a float.
_LEAST, _MOST = 1e-100, 1e100

_ByKind = dict[Kind, tuple[float, ...]]


def check_time(time: float, what: str, about: str, *, zero: bool) -> None:
    """Raises PlanError if a time is out of bounds, or if it is zero where a pass must take time."""
    if fault := _fault([time], "zero or a positive number" if zero else "a positive number", zero=zero):
        raise PlanError(f"{what} must be {fault}, not {time:g}", about)


def check_share(share: float, what: str, about: str, most: float = 1) -> None:
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
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    messages: tuple[float, float] = (0.0, 0.0)
    attention: tuple[float, float] = (0.0, 0.0)
    stock_recompute: float = 0.0
    recomputed_layers: int | None = None
    recompute_time: float = 1.0

    def __post_init__(self) -> None:
        if fault := _fault(self.passes, "positive numbers", zero=False):
            raise PlanError(f"costs F,I,W must be {fault}, not {','.join(f'{t:g}' for t in self.passes)}", "costs")
        check_share(self.stock_recompute, "the forward that is recomputed", "stock_recompute")
        check_time(self.recompute_time, "the time of a recompute pass", "costs", zero=False)
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
        messages = scale(self.messages[0]), scale(self.messages[1])
        return replace(self, forward=forward, input_grad=input_grad, weight_grad=weight_grad, messages=messages)

    def repeated(self, counts: Sequence[int]) -> list[float]:
        """Returns the share of F that Megatron's own recompute repeats in I, for stages of so many layers."""
        if (first := self.recomputed_layers) is None:
            return [self.stock_recompute] * len(counts)
        return [self.stock_recompute * min(count, first) / max(count, 1) for count in counts]

    def on_stages(self, one: float, layers: Sequence[Load], ends: Sequence[Load], repeated: Sequence[float]) -> _ByKind:
        """Returns the times of F, I, W and R on each stage.

        Args:
            one: an average layer as a multiple of half a rank's layers.
            layers: load of each stage's layers, in average layers.
            ends: load of the parts before and after the layers, which run their whole backward in I.
            repeated: see :meth:`repeated`.
        """
        forward, input_grad, weight_grad = self.passes
        return {
            Kind.F: tuple(
                one * (forward * load.forward + forward * end.forward) for load, end in zip(layers, ends, strict=True)
            ),
            Kind.I: tuple(
                one
                * (
                    (input_grad + again * forward) * load.input_grad
                    + (input_grad * end.input_grad + weight_grad * end.weight_grad)
                )
                for load, end, again in zip(layers, ends, repeated, strict=True)
            ),
            Kind.W: tuple(one * (weight_grad * load.weight_grad) for load in layers),
            Kind.R: tuple(one * (self.recompute_time * forward * load.forward) for load in layers),
        }

    def of_layers(
        self, one: float, layers: Sequence[Load], recompute: Sequence[float], repeated: Sequence[float]
    ) -> tuple[_ByKind, _ByKind]:
        """Returns attention's part, and that of messages of experts, of the F, I and R of each stage; empty without.

        Only decoder layers have them.

        Args:
            one, layers, repeated: see :meth:`on_stages`.
            recompute: time of each stage's R; empty without.
        """
        if not any(self.attention + self.messages):
            return {}, {}
        times = self.on_stages(one, layers, [Load()] * len(layers), repeated) | {Kind.R: tuple(recompute)}
        del times[Kind.W]

        def parts(shares: Callable[[float], Mapping[Kind, float]]) -> _ByKind:
            of = [shares(again) for again in repeated]
            return {
                kind: tuple(share[kind] * time for share, time in zip(of, each, strict=True))
                for kind, each in times.items()
                if each
            }

        attention = parts(self._attention) if any(self.attention) else {}
        return attention, parts(self._messages) if any(self.messages) else {}

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
