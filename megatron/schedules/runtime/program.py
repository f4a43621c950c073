"""A program: what one rank does in a run, computing and messages, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.planning.placement import Placement


class ProgramError(RuntimeError):
    """A program that cannot be lowered, is unsound, or did not do what it says; names ranks and actions."""


class Op(StrEnum):
    """What an action does.

    Computing: ``F``, ``I``, ``W``, ``B`` as in :class:`~megatron.schedules.planning.passes.Kind`.

    Messages carry the name of the stage at their own end: ``SEND_F`` of s sends its output to s + 1, ``RECV_F``
    of s posts the receive of its input from s - 1, ``SEND_B`` of s sends the gradient of its input to s - 1,
    ``RECV_B`` of s posts the receive of the gradient of its output from s + 1.
    """

    F = "F"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


class Action(NamedTuple):
    """One step of a program, written ``{stage}{op}{microbatch}``: ``2F0``, ``2SEND_F0``, ``3RECV_F0``.

    ``peer`` is the pipeline rank at the other end of a message, None for computing.
    """

    op: Op
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Slot(NamedTuple):
    """Where a rank keeps a tensor between two passes, until the pass or the message that needs it takes it.

    ``activation`` tells a stage's input from the gradient of a stage's output; ``stage`` is the stage that
    uses it.
    """

    activation: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "input" if self.activation else "output's gradient"
        return f"stage {self.stage}'s {what} of microbatch {self.microbatch}"


def slot_needed(action: Action, last_stage: int) -> Slot | None:
    """What ``action`` takes from the rank's slots: a pass its input, a send its message; None for nothing."""
    op, stage, microbatch, _ = action
    if op is Op.F:
        return Slot(True, stage, microbatch) if stage else None
    if op is Op.I or op is Op.B:
        return Slot(False, stage, microbatch) if stage < last_stage else None
    if op is Op.SEND_F:
        return Slot(True, stage + 1, microbatch)
    if op is Op.SEND_B:
        return Slot(False, stage - 1, microbatch)
    return None


def slot_filled(action: Action, last_stage: int) -> Slot | None:
    """What ``action`` puts there: a pass its result, a receive what arrives; None for nothing."""
    op, stage, microbatch, _ = action
    if op is Op.F:
        return Slot(True, stage + 1, microbatch) if stage < last_stage else None
    if op is Op.I or op is Op.B:
        return Slot(False, stage - 1, microbatch) if stage else None
    if op is Op.RECV_F:
        return Slot(True, stage, microbatch)
    if op is Op.RECV_B:
        return Slot(False, stage, microbatch)
    return None


class Step(NamedTuple):
    """An action with the slots that it takes from and puts into."""

    action: Action
    needed: Slot | None
    filled: Slot | None


class Channel(NamedTuple):
    """The one-way connection from one pipeline rank to another; each has its own process group."""

    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"


def channels_of(placement: Placement) -> tuple[Channel, ...]:
    """The channels that schedules on ``placement`` use, sorted: both ways between neighbouring stages' ranks."""
    hops = [(a, b) for a, b in pairwise(placement.rank_of) if a != b]
    return tuple(sorted({Channel(*pair) for a, b in hops for pair in ((a, b), (b, a))}))


@dataclass(frozen=True)
class Program:
    """What ``rank`` does, first to last.

    Args:
        rank: the pipeline rank.
        actions: its actions in order. A receive is posted and does not wait; the pass that uses it does.
        placement: where the stages live.
        microbatches: n.
    """

    rank: int
    actions: tuple[Action, ...]
    placement: Placement
    microbatches: int

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((action.stage, action.microbatch) for action in self.actions if action.op is Op.I)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The actions with their slots: a program is made once and run in every iteration."""
        last = self.placement.last_stage
        return tuple(Step(action, slot_needed(action, last), slot_filled(action, last)) for action in self.actions)

    def splits(self, stage: int, microbatch: int) -> bool:
        """Whether that backward is done as I and W rather than as B."""
        return (stage, microbatch) in self._split

    def __str__(self) -> str:
        return f"rank {self.rank}: " + " ".join(map(str, self.actions))
