"""How much of the weight gradients runs behind each message inside a pass."""

from __future__ import annotations

from collections import Counter

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.stage_costs import StageCosts

# Operations that take as long as a byte of a message, if the plan does not know how long messages take: 400 TFLOP/s
# (H100, bf16) over 50 GB/s (a network of 400 Gbit/s).
FLOPS_PER_BYTE = 8000.0


class MessageBudget:
    """Floating point operations that take as long as each message.

    The plan says how long each pass waits for its messages, and how long W takes. What a pass waits is shared out by
    bytes: a message of a tenth of the pass's bytes gets a tenth of it. If the plan does not say so, each byte gets
    :data:`FLOPS_PER_BYTE`. What one message leaves, because a piece was longer or shorter than it, the next message of
    the pass gets.

    Args:
        costs: of the plan's stages; None if there is no plan.
    """

    def __init__(self, costs: StageCosts | None = None) -> None:
        # Time of the messages and time of W, by stage; no times where the plan has no messages.
        known = costs is not None and costs.has_messages
        self._messages, self._weights = (costs.of_messages, costs.times[Kind.W]) if costs and known else ({}, ())
        self._pass: tuple[Kind, int] | None = None
        self._sent: Counter[tuple[Kind, int]] = Counter()  # bytes of the last pass, by kind and stage
        self._now, self._left = 0, 0.0
        self._flops_per_time = 0.0

    def begin(self, kind: Kind, stage: int) -> None:
        """Begins a pass of this rank."""
        if self._pass is not None:
            self._sent[self._pass] = self._now
        self._pass, self._now, self._left = (kind, stage), 0, 0.0

    def deferred(self, stage: int, flops: float) -> None:
        """Says how many floating point operations an I of ``stage`` has left to its W."""
        if self._weights and self._weights[stage] and flops:
            self._flops_per_time = flops / self._weights[stage]

    def behind(self, sent: int) -> float:
        """Floating point operations to run behind a message of ``sent`` bytes that has just started."""
        self._now += sent
        self._left += sent * self._flops_per_byte()
        return self._left

    def left(self, flops: float) -> None:
        """Says what of :meth:`behind` was not run; negative if more was."""
        self._left = flops

    def _flops_per_byte(self) -> float:
        if self._pass is None or self._pass[0] not in self._messages:
            return FLOPS_PER_BYTE
        kind, stage = self._pass
        # I sends back what F sends, and R sends it again.
        bytes_of_pass = self._sent[self._pass] or self._sent[Kind.F, stage]
        if not (bytes_of_pass and self._flops_per_time):
            return FLOPS_PER_BYTE  # no W is due so early
        return self._messages[kind][stage] * self._flops_per_time / bytes_of_pass
