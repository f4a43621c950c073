"""A program: what one rank does in a run, computing and messages, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.planning.kinds import KINDS, WHOLES, At, Kind, Result
from megatron.schedules.planning.placement import Placement


class ProgramError(RuntimeError):
    """A program that cannot be lowered, is unsound, or did not do what it says; names ranks and actions."""


class Op(StrEnum):
    """What an action does that is no pass.

    Messages carry the name of the stage at their own end: ``SEND_F`` of s sends its output to s + 1, ``RECV_F``
    of s posts the receive of its input from s - 1, ``SEND_B`` of s sends the gradient of its input to s - 1,
    ``RECV_B`` of s posts the receive of the gradient of its output from s + 1.

    ``REDUCE`` of s starts the data-parallel reduction of its gradients, which nothing adds to any more.
    """

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"


class Message(NamedTuple):
    """How what one stage makes gets to another: the ops at both ends, and from which stage to which."""

    send: Op
    receive: Op
    step: int


MESSAGES: Mapping[Result, Message] = {
    Result.ACTIVATION: Message(Op.SEND_F, Op.RECV_F, +1),
    Result.GRADIENT: Message(Op.SEND_B, Op.RECV_B, -1),
}
SENDS: Mapping[Kind | Op, Result] = {message.send: result for result, message in MESSAGES.items()}
RECEIVES: Mapping[Kind | Op, Result] = {message.receive: result for result, message in MESSAGES.items()}
# What a pass takes that another stage made.
TAKEN: Mapping[Kind | Op, Result] = {
    kind: result
    for kind, row in KINDS.items()
    for need in row.needs
    if need.at in (At.PREVIOUS, At.NEXT) and (result := KINDS[need.kinds[0]].makes)
}
_MADE: Mapping[Kind | Op, Result] = {kind: row.makes for kind, row in KINDS.items() if row.makes}
_IN_PARTS = {part for parts in WHOLES for part in parts}


class Action(NamedTuple):
    """One step of a program, written ``{stage}{op}{microbatch}``: ``2F0``, ``2SEND_F0``, ``3RECV_F0``.

    ``peer`` is the pipeline rank at the other end of a message, None for all else.
    """

    op: Kind | Op
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Slot(NamedTuple):
    """Where a rank keeps a tensor between two passes, until the pass or the message that needs it takes it.

    Args:
        result: what it is.
        stage: the stage that uses it.
        microbatch: its microbatch.
    """

    result: Result
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "input" if self.result is Result.ACTIVATION else "output's gradient"
        return f"stage {self.stage}'s {what} of microbatch {self.microbatch}"


def slot_needed(action: Action, last_stage: int) -> Slot | None:
    """What ``action`` takes from the rank's slots: a pass its input, a send its message; None for nothing."""
    op, stage, microbatch, _ = action
    if op in TAKEN:
        result = TAKEN[op]
        return Slot(result, stage, microbatch) if 0 <= stage - MESSAGES[result].step <= last_stage else None
    if op in SENDS:
        return Slot(SENDS[op], stage + MESSAGES[SENDS[op]].step, microbatch)
    return None


def slot_filled(action: Action, last_stage: int) -> Slot | None:
    """What ``action`` puts there: a pass its result, a receive what arrives; None for nothing."""
    op, stage, microbatch, _ = action
    if op in _MADE:
        user = stage + MESSAGES[_MADE[op]].step
        return Slot(_MADE[op], user, microbatch) if 0 <= user <= last_stage else None
    if op in RECEIVES:
        return Slot(RECEIVES[op], stage, microbatch)
    return None


class Instruction(NamedTuple):
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
        return frozenset((action.stage, action.microbatch) for action in self.actions if action.op in _IN_PARTS)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The actions with their slots: a program is made once and run in every iteration."""
        last = self.placement.last_stage
        return tuple(
            Instruction(action, slot_needed(action, last), slot_filled(action, last)) for action in self.actions
        )

    @cached_property
    def completing(self) -> Mapping[tuple[int, int], int]:
        """For each stage and microbatch whose last pass completes the stage's gradients, how many passes follow it."""
        found: dict[tuple[int, int], int] = {}
        left = 0
        for action in reversed(self.actions):
            if action.op is Op.REDUCE:
                found[action.stage, action.microbatch] = left
            left += isinstance(action.op, Kind)
        return found

    @cached_property
    def messages_held(self) -> int:
        """The most messages that are held at once: posted ahead and not yet used, or sent since the pass before."""
        most = ahead = sent = 0
        for instruction in self.instructions:
            op = instruction.action.op
            ahead += op in RECEIVES
            sent += op in SENDS
            if isinstance(op, Kind):
                ahead -= self.sender(instruction) is not None
                most, sent = max(most, ahead + sent), 0
        return most

    def sender(self, instruction: Instruction) -> int | None:
        """The rank whose message brings what ``instruction`` needs; None where no message does."""
        if instruction.needed is None or instruction.action.op in SENDS:
            return None
        result, stage, _ = instruction.needed
        rank = self.placement.rank_of[stage - MESSAGES[result].step]
        return None if rank == self.rank else rank

    @cached_property
    def _weights_after(self) -> Mapping[Action, Action]:
        """The pass that a W comes right after, and that W."""
        passes = [action for action in self.actions if isinstance(action.op, Kind)]
        return {before: after for before, after in pairwise(passes) if after.op is Kind.W}

    def weight_after(self, kind: Kind, stage: int, microbatch: int) -> tuple[int, int] | None:
        """Stage and microbatch of the W that this rank does right after that pass; None where it does something else.

        None for a W that follows its own I, too: before that it has no operands.
        """
        after = self._weights_after.get(Action(kind, stage, microbatch))
        if after is None or (kind is Kind.I and (stage, microbatch) == (after.stage, after.microbatch)):
            return None
        return after.stage, after.microbatch

    def splits(self, stage: int, microbatch: int) -> bool:
        """Whether that backward is done as I and W rather than as B."""
        return (stage, microbatch) in self._split

    def __str__(self) -> str:
        return f"rank {self.rank}: " + " ".join(map(str, self.actions))
