"""Program: the passes, messages and collectives of one rank, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.schedule.kinds import COMPUTING, ENDS_GRADIENTS, KINDS, PARTS, At, Kind, Resource, Result, using
from megatron.schedules.schedule.placement import Placement


class ProgramError(RuntimeError):
    """Error in a program: it cannot be lowered, would not end, or did not run as written. Names ranks and actions."""


class Op(StrEnum):
    """An action that is not a pass.

    Messages are written with the stage at their own end: ``SEND_F`` of s sends its output to s + 1, ``RECV_F`` of s
    posts the receive of its input from s - 1, ``SEND_B`` of s sends the gradient of its input to s - 1, ``RECV_B`` of
    s posts the receive of the gradient of its output from s + 1.

    ``REDUCE`` of s starts the data-parallel reduction of its gradients, to which nothing is added any more.

    The others exist under vocabulary parallelism: collectives of all pipeline ranks (:data:`COLLECTIVES`), and ``ADD``,
    which adds the gradient of a microbatch's embedding to the rank's part of the table and is written with the rank's
    first stage. ``EMBED`` looks tokens up, each rank those of its part. ``OUTPUT`` brings the last stage's output to
    all ranks, ``SUM`` adds up the gradients that each rank's part of the output layer gives for it, ``WEIGH`` brings
    the gradient of each token's loss to all ranks, and ``EMBED_BACK`` that of the embedding's output.
    """

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    EMBED = "EMBED"
    OUTPUT = "OUTPUT"
    SUM = "SUM"
    WEIGH = "WEIGH"
    EMBED_BACK = "EMBED_BACK"
    ADD = "ADD"


class Message(NamedTuple):
    """Ops at both ends of a message between stages, and the step from the sender's stage to the receiver's."""

    send: Op
    receive: Op
    step: int


MESSAGES: Mapping[Result, Message] = {
    Result.ACTIVATION: Message(Op.SEND_F, Op.RECV_F, +1),
    Result.GRADIENT: Message(Op.SEND_B, Op.RECV_B, -1),
}
# The most unfinished sends of a rank to one other. Simulated with passes that vary by 30 %, a slow rank, and messages
# as long as F, two cost no time; one costs up to 0.2 %.
SENDS_IN_FLIGHT = 2
SENDS: Mapping[Kind | Op, Result] = {message.send: result for result, message in MESSAGES.items()}
RECEIVES: Mapping[Kind | Op, Result] = {message.receive: result for result, message in MESSAGES.items()}
# Result of another stage that each kind of pass takes.
_TAKEN: Mapping[Kind | Op, Result] = {
    kind: result
    for kind, row in KINDS.items()
    for need in row.needs
    if need.at in (At.PREVIOUS, At.NEXT) and (result := KINDS[need.kinds[0]].makes)
}
_MADE: Mapping[Kind | Op, Result] = {kind: row.makes for kind, row in KINDS.items() if row.makes}
_SPARING = {kind for kind, row in KINDS.items() if row.spares}


class Ranks(Enum):
    """The ranks that take part in one side of a collective."""

    FIRST = "that of the first stage"
    LAST = "that of the last stage"
    EVERY = "every rank"

    def include(self, stage: int, last_stage: int) -> bool:
        """Returns whether the rank that writes the collective with ``stage`` takes part."""
        return self is Ranks.EVERY or stage == (0 if self is Ranks.FIRST else last_stage)


class Collective(NamedTuple):
    """One collective of all pipeline ranks, for one microbatch.

    Args:
        chunk: which of a rank's stages its action names: 0 for the first, -1 for the last.
        made_by: kinds of passes. One of them computes the rank's part, on the same stage. Empty if no pass does.
        makers: ranks that contribute a part.
        used_by: kinds of passes. One of them takes the result, on the same stage.
        users: ranks that get the result.
    """

    chunk: int
    made_by: tuple[Kind, ...]
    makers: Ranks
    used_by: tuple[Kind | Op, ...]
    users: Ranks


# Collectives with the same position in the global order are posted in this order.
COLLECTIVES: Mapping[Kind | Op, Collective] = {
    Op.EMBED: Collective(0, (), Ranks.EVERY, (Kind.F,), Ranks.FIRST),
    Op.OUTPUT: Collective(-1, (Kind.F,), Ranks.LAST, (Kind.S,), Ranks.EVERY),
    Op.SUM: Collective(-1, (Kind.S,), Ranks.EVERY, (Kind.I, Kind.B), Ranks.LAST),
    Op.WEIGH: Collective(-1, (Kind.I, Kind.B), Ranks.LAST, (Kind.T,), Ranks.EVERY),
    Op.EMBED_BACK: Collective(0, (Kind.I, Kind.B), Ranks.FIRST, (Op.ADD,), Ranks.EVERY),
}
# Ops that add to a stage's weight gradients, and the sort of gradients that the last of them completes.
ADDS_GRADIENTS: Mapping[Kind | Op, Kind | Op] = {Op.ADD: Op.ADD} | {**ENDS_GRADIENTS}
_TAKES: Mapping[Kind | Op, Op] = {user: Op(op) for op, collective in COLLECTIVES.items() for user in collective.used_by}


def computes(op: Kind | Op) -> bool:
    """Returns whether ``op`` is work for the device: a pass, or an addition of gradients."""
    return isinstance(op, Kind) or op is Op.ADD


def collectives_among(present: Collection[Kind | Op]) -> tuple[Op, ...]:
    """Returns, in order, the collectives of programs whose passes are ``present``; none without S and T."""
    if not any(isinstance(op, Kind) and KINDS[op].of_ranks for op in present):
        return ()
    return tuple(
        Op(op) for op, row in COLLECTIVES.items() if not row.made_by or any(kind in present for kind in row.made_by)
    )


class Action(NamedTuple):
    """One step of a program, written ``{stage}{op}{microbatch}``: ``2F0``, ``2SEND_F0``, ``3RECV_F0``.

    ``peer`` is the pipeline rank at the other end of a message, None for everything else.
    """

    op: Kind | Op
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Slot(NamedTuple):
    """Storage for a tensor on a rank until a pass or a message takes it.

    Args:
        result: kind of the tensor: the result of another stage, or of a collective.
        stage: stage that uses it.
        microbatch: its microbatch.
    """

    result: Result | Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        if isinstance(self.result, Op):
            return f"the result of {self.stage}{self.result}{self.microbatch}"
        what = "input" if self.result is Result.ACTIVATION else "output's gradient"
        return f"stage {self.stage}'s {what} of microbatch {self.microbatch}"


def _slot_needed(action: Action, last_stage: int, present: Collection[Kind | Op]) -> Slot | None:
    """Returns the slot with a pass's input or a send's message; None if ``action`` has neither."""
    op, stage, microbatch, _ = action
    if op in _TAKEN and 0 <= stage - MESSAGES[_TAKEN[op]].step <= last_stage:
        return Slot(_TAKEN[op], stage, microbatch)
    if op in SENDS:
        return Slot(SENDS[op], stage + MESSAGES[SENDS[op]].step, microbatch)
    collective = _TAKES.get(op)
    if collective is not None and collective in present and COLLECTIVES[collective].users.include(stage, last_stage):
        return Slot(collective, stage, microbatch)
    return None


def _slot_filled(action: Action, last_stage: int, present: Collection[Kind | Op]) -> Slot | None:
    """Returns the slot that ``action`` fills with its result or with what it receives; None if it fills none."""
    op, stage, microbatch, _ = action
    if op in _MADE:
        user = stage + MESSAGES[_MADE[op]].step
        return Slot(_MADE[op], user, microbatch) if 0 <= user <= last_stage else None
    if op in RECEIVES:
        return Slot(RECEIVES[op], stage, microbatch)
    if op in COLLECTIVES:
        _, _, _, used_by, users = COLLECTIVES[op]
        if users.include(stage, last_stage) and any(user in present for user in used_by):
            return Slot(Op(op), stage, microbatch)
    return None


class Instruction(NamedTuple):
    """An action, the slot that it reads and the slot that it fills."""

    action: Action
    needed: Slot | None
    filled: Slot | None


class Ending(NamedTuple):
    """The last pass of a stage that adds one sort of gradients.

    Args:
        passes_left: number of the rank's passes that follow it, without copies.
        later: sorts of gradients that are complete later: W (or B), T, ``ADD``.
    """

    passes_left: int
    later: frozenset[Kind | Op]


class Channel(NamedTuple):
    """The one-way connection from one pipeline rank to another; each has its own process group."""

    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"


def channels_of(placement: Placement) -> tuple[Channel, ...]:
    """Returns the channels of schedules on ``placement``, sorted: both ways between ranks of neighbouring stages."""
    links = [(a, b) for a, b in pairwise(placement.rank_of) if a != b]
    return tuple(sorted({Channel(*pair) for a, b in links for pair in ((a, b), (b, a))}))


@dataclass(frozen=True)
class Program:
    """All actions of ``rank`` in one run, in order.

    Args:
        rank: the pipeline rank.
        actions: its actions in order. A receive is posted and does not wait; the pass that uses it does.
        placement: rank of each stage.
        microbatches: n.
    """

    rank: int
    actions: tuple[Action, ...]
    placement: Placement
    microbatches: int

    def _passes_of(self, kinds: Collection[Kind]) -> frozenset[tuple[int, int]]:
        """Returns stage and microbatch of each pass of ``kinds``."""
        return frozenset((action.stage, action.microbatch) for action in self.actions if action.op in kinds)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return self._passes_of(PARTS)

    @cached_property
    def _recomputed(self) -> frozenset[tuple[int, int]]:
        return self._passes_of(_SPARING)

    @cached_property
    def _offloaded(self) -> frozenset[tuple[int, int]]:
        return self._passes_of(using(Resource.TO_HOST))

    def splits(self, stage: int, microbatch: int) -> bool:
        """Returns whether this backward is split into I and W."""
        return (stage, microbatch) in self._split

    def recomputes(self, stage: int, microbatch: int) -> bool:
        """Returns whether an R comes between this forward and its backward."""
        return (stage, microbatch) in self._recomputed

    def offloads(self, stage: int, microbatch: int) -> bool:
        """Returns whether the activations of this forward are offloaded (O) and loaded back (L)."""
        return (stage, microbatch) in self._offloaded

    @cached_property
    def backward_is_stocks(self) -> bool:
        """True if no backward is split, and those of a stage come in the order of its forwards."""
        order: dict[tuple[Kind | Op, int], list[int]] = {}
        for action in self.actions:
            order.setdefault((action.op, action.stage), []).append(action.microbatch)
        ordered = (order.get((Kind.B, stage)) in (None, order[Kind.F, stage]) for op, stage in order if op is Kind.F)
        return not self._split and all(ordered)

    @property
    def has_recompute(self) -> bool:
        """True if the program has an R."""
        return bool(self._recomputed)

    @property
    def has_offload(self) -> bool:
        """True if the program has an O."""
        return bool(self._offloaded)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Actions with their slots. They are computed once and run in every iteration."""
        return tuple(self.steps())

    def steps(self) -> Iterator[Instruction]:
        """Yields the instructions one by one without storing them, for checks that read each only once."""
        for action in self.actions:
            op, stage, microbatch, _ = action
            _, needed, filled = self._of_each_stage[op, stage]
            yield Instruction(
                action,
                needed and Slot(needed.result, needed.stage, microbatch),
                filled and Slot(filled.result, filled.stage, microbatch),
            )

    @cached_property
    def _of_each_stage(self) -> Mapping[tuple[Kind | Op, int], Instruction]:
        """One instruction of each op and stage: those of other microbatches use the same slots of theirs."""
        last, present = self.placement.last_stage, {action.op for action in self.actions}
        actions = {(action.op, action.stage): action for action in self.actions}
        return {
            key: Instruction(action, _slot_needed(action, last, present), _slot_filled(action, last, present))
            for key, action in actions.items()
        }

    @cached_property
    def endings(self) -> Mapping[tuple[Kind | Op, int, int], Ending]:
        """The last W or B, T and ``ADD`` of each stage with a ``REDUCE``, by kind, stage and microbatch."""
        endings: dict[tuple[Kind | Op, int, int], Ending] = {}
        seen: dict[int, frozenset[Kind | Op]] = {}
        left = 0
        for op, stage, microbatch, _ in reversed(self.actions):
            if op is Op.REDUCE:
                seen[stage] = frozenset()
            elif stage in seen and op in ADDS_GRADIENTS and ADDS_GRADIENTS[op] not in seen[stage]:
                endings[op, stage, microbatch] = Ending(left, seen[stage])
                seen[stage] |= {ADDS_GRADIENTS[op]}
            left += op in COMPUTING
        return endings

    @cached_property
    def messages_held(self) -> int:
        """The most messages in memory during a pass.

        Counts those posted and not yet used, and the last ones sent to each peer. The result of a collective counts as
        a message.
        """
        each = self._of_each_stage.items()
        received = {
            key
            for key, (action, _, filled) in each
            if action.op in RECEIVES or (action.op in COLLECTIVES and filled is not None)
        }
        used = {key for key, instruction in each if self.arrives(instruction)}
        most = ahead = 0
        sent: Counter[int | None] = Counter()
        for op, stage, _, peer in self.actions:
            ahead += (op, stage) in received
            if op in SENDS:
                sent[peer] = min(sent[peer] + 1, SENDS_IN_FLIGHT)
            elif computes(op):
                ahead -= (op, stage) in used
                most = max(most, ahead + sent.total())
        return most

    def arrives(self, instruction: Instruction) -> bool:
        """Returns whether the input of ``instruction`` comes in a message or from a collective."""
        needed = instruction.needed
        if needed is None or instruction.action.op in SENDS:
            return False
        return isinstance(needed.result, Op) or self.sender(instruction) is not None

    def sender(self, instruction: Instruction) -> int | None:
        """Returns the one other rank that sends the input of ``instruction``; None if there is none, or several."""
        if instruction.needed is None or instruction.action.op in SENDS:
            return None
        result, stage, _ = instruction.needed
        if isinstance(result, Result):
            rank = self.placement.rank_of[stage - MESSAGES[result].step]
        elif COLLECTIVES[result].makers is Ranks.EVERY:
            return None
        else:
            rank = self.placement.rank_of[0 if COLLECTIVES[result].makers is Ranks.FIRST else -1]
        return None if rank == self.rank else rank

    @cached_property
    def weights_after(self) -> Mapping[tuple[Kind | Op, int, int], tuple[int, int]]:
        """Stage and microbatch of the W that directly follows a pass, by kind, stage and microbatch of the pass.

        Without the I of this W: before it, the W has no operands.
        """
        passes = [action[:3] for action in self.actions if action.op in COMPUTING]
        return {
            before: after[1:]
            for before, after in pairwise(passes)
            if after[0] is Kind.W and before != (Kind.I, *after[1:])
        }

    def __str__(self) -> str:
        return f"rank {self.rank}: " + " ".join(map(str, self.actions))
