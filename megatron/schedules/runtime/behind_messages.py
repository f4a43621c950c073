"""Weight gradients behind messages of experts: which may run ahead of their W, and how much behind each message."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import takewhile

from megatron.schedules.programs.program import Action, Program
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.stage_costs import StageCosts


class ComingWeights:
    """The next W passes of a rank that may already run.

    Args:
        program: program of the rank; a new run needs a new object.
    """

    def __init__(self, program: Program) -> None:
        self._endings = program.endings
        # The coming passes that add to the gradients of linears, and which W have had their I.
        self._adding = deque(action for action in program.actions if action.op in (Kind.B, Kind.W))
        self._due: set[tuple[int, int]] = set()

    def ended(self, kind: Kind, stage: int, microbatch: int) -> None:
        """An I, W or B has ended."""
        if kind is Kind.I:
            self._due.add((stage, microbatch))
        elif self._adding and self._adding[0][:3] == (kind, stage, microbatch):  # a tool may repeat a pass
            self._adding.popleft()

    def due(self) -> Iterator[tuple[int, int]]:
        """Yields (stage, microbatch) of the W that may run now, in order.

        The last W of a chunk stays whole: data-parallel reductions begin with it, on all replicas alike.
        """
        for action in takewhile(self._may_run, self._adding):
            yield action.stage, action.microbatch

    def _may_run(self, action: Action) -> bool:
        op, stage, microbatch, _ = action
        due = op is Kind.W and (stage, microbatch) in self._due
        return due and (op, stage, microbatch) not in self._endings


# Operations that take as long as a byte of a message, if the plan does not know how long messages take: 400 TFLOP/s
# (H100, bf16) over 50 GB/s (a network of 400 Gbit/s).
FLOPS_PER_BYTE = 8000.0


class MessageBudget:
    """Floating point operations that take as long as each message.

    The plan says how long each pass waits for its messages, and how long W takes. This wait is divided among the pass's
    messages by their bytes. If the plan does not say so, each byte gets :data:`FLOPS_PER_BYTE`. If a message hides more
    or less than its budget, the difference goes to the next message of the pass.

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
        """Records how many floating point operations an I of ``stage`` has deferred to its W."""
        if self._weights and self._weights[stage] and flops:
            self._flops_per_time = flops / self._weights[stage]

    def behind(self, sent: int) -> float:
        """Floating point operations to run behind a message of ``sent`` bytes that has just started."""
        self._now += sent
        self._left += sent * self._flops_per_byte()
        return self._left

    def left(self, flops: float) -> None:
        """Records how much of :meth:`behind` was not run; negative if more was run."""
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
