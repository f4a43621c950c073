"""The checker: proves that the programs of all ranks run to their end together, before any of them starts.

The model is the strictest there is. A channel is a directed pair of ranks with its own process group. It buffers
nothing: a message is through when its sender has posted the send and its receiver the receive, and the k-th send meets
the k-th receive. A collective is through when all ranks have posted it, and the k-th of each meets the k-th of all
others. And before every single action, a pass or the posting of a message, a rank waits until all that it has posted is
through (``device_sync``).

No transport here waits so. But a rank may come to wait for its whole device in any pass, where something synchronises,
and at any first use of a kernel, whose code is then loaded; with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, and
more queues may be shared too) whatever is queued waits for the messages before it; and where shapes are not known
beforehand hosts wait for each other. What ends under this model ends wherever any of that happens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megatron.schedules.runtime.program import (
    ADDS_GRADIENTS,
    COLLECTIVES,
    MESSAGES,
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Op,
    Program,
    ProgramError,
    Slot,
    collectives_among,
)
from megatron.schedules.schedule.kinds import Kind


def check(programs: Sequence[Program]) -> None:
    """Prove that ``programs`` end, and that all who meet agree on order and meaning.

    Args:
        programs: one for each pipeline rank, in order.

    Time is linear in the actions.

    Raises:
        ProgramError: naming the ranks and actions of what is wrong: a pass without its input, a result never
            used, a send that meets another receive, ranks that meet in different collectives, one that lacks its part
            or is missing, gradients that are added to after their reduction has started, or ranks that wait for each
            other.
    """
    for rank, program in enumerate(programs):
        _check_rank(rank, program)
    _check_channels(programs)
    _check_collectives(programs)
    _Run(programs).to_the_end()


def _check_rank(rank: int, program: Program) -> None:
    """Follow one rank's slots and gradients."""
    if program.rank != rank:
        raise ProgramError(f"the program of rank {program.rank} stands in the place of rank {rank}")
    rank_of, last = program.placement.rank_of, program.placement.last_stage
    held: dict[Slot, Kind | Op] = {}
    reduced: dict[int, Action] = {}
    for action, needed, filled in program.steps():
        op, stage, _, peer = action
        if not 0 <= stage <= last or rank_of[stage] != rank:
            raise ProgramError(f"rank {rank}: {action}: stage {stage} is not on this rank")
        if stage in reduced and (op is Op.REDUCE or op in ADDS_GRADIENTS):
            raise ProgramError(f"rank {rank}: {action} comes after {reduced[stage]}, which has reduced its gradients")
        if op is Op.REDUCE:
            reduced[stage] = action
        if op in SENDS or op in RECEIVES:
            other = stage + (MESSAGES[SENDS[op]].step if op in SENDS else -MESSAGES[RECEIVES[op]].step)
            if not 0 <= other <= last or rank_of[other] == rank or rank_of[other] != peer:
                raise ProgramError(f"rank {rank}: {action} to or from rank {peer}, where stage {other} is not")
        if needed is not None:
            if needed not in held:
                raise ProgramError(f"rank {rank}: {action} needs {needed}, which is not there")
            if held.pop(needed) in RECEIVES and op in SENDS:
                raise ProgramError(f"rank {rank}: {action} sends on what was only received")
        if filled is not None:
            if filled in held:
                raise ProgramError(f"rank {rank}: {action} gives {filled}, which is already there")
            held[filled] = op
    if held:
        raise ProgramError(f"rank {rank}: {next(iter(held))} is never used")


def _check_parts(program: Program) -> None:
    """Whether each collective stands with the right stage, after what makes this rank's part of it."""
    stages, last = program.placement.stages_of(program.rank), program.placement.last_stage
    done: set[Action] = set()
    for action in program.actions:
        done.add(action)
        if action.op not in COLLECTIVES:
            continue
        chunk, made_by, makers, _, _ = COLLECTIVES[action.op]
        stage = stages[chunk]
        if action.stage != stage:
            raise ProgramError(f"rank {program.rank}: {action} is written with stage {action.stage} instead of {stage}")
        parts = [Action(kind, stage, action.microbatch) for kind in made_by]
        if parts and makers.include(stage, last) and done.isdisjoint(parts):
            made = " or ".join(map(str, parts))
            raise ProgramError(f"rank {program.rank}: {action} comes before {made}, which makes this rank's part of it")


def _check_collectives(programs: Sequence[Program]) -> None:
    """Compare the collectives of all ranks, one by one, count them, and see that no rank lacks its part of one."""
    present = {action.op for program in programs for action in program.actions}
    expected = {*collectives_among(present), *(op for op in COLLECTIVES if op in present)}
    rows = [[action for action in program.actions if action.op in COLLECTIVES] for program in programs]
    for number, collective in enumerate(zip_longest(*rows)):
        for rank, action in enumerate(collective):
            if action is None or collective[0] is None or action[::2] != collective[0][::2]:
                found = [f"rank {r} posts {collective[r] or 'none'}" for r in (0, rank)]
                raise ProgramError(f"collective {number}: {' and '.join(found)}")
    posted = Counter((action.op, action.microbatch) for action in rows[0])
    for op in sorted(expected):
        for m in range(programs[0].microbatches):
            if posted[op, m] != 1:
                raise ProgramError(f"{op} of microbatch {m} is there {posted[op, m]} times instead of once")
    for program in programs if expected else ():
        _check_parts(program)


def _check_channels(programs: Sequence[Program]) -> None:
    """Compare both ends of every channel, message by message."""
    sends: dict[Channel, list[Action]] = {}
    receives: dict[Channel, list[Action]] = {}
    for program in programs:
        for action in program.actions:
            channel = _channel(program.rank, action)
            if channel is not None:
                (sends if action.op in SENDS else receives).setdefault(channel, []).append(action)
    for channel in sorted(sends.keys() | receives.keys()):
        sent, received = sends.get(channel, []), receives.get(channel, [])
        for index, (send, receive) in enumerate(zip(sent, received, strict=False)):
            _, op, step = MESSAGES[SENDS[send.op]]
            if (op, send.stage + step, send.microbatch) != receive[:3]:
                raise ProgramError(
                    f"message {index} on channel {channel} is {send}, but rank {channel.destination} posts {receive}"
                )
        if len(sent) != len(received):
            index = min(len(sent), len(received))
            extra = f"{sent[index]} is never received" if len(sent) > index else f"{received[index]} is never sent"
            raise ProgramError(f"channel {channel} has {len(sent)} sends and {len(received)} receives: {extra}")


def _channel(rank: int, action: Action) -> Channel | None:
    """The channel that ``action`` of ``rank`` posts on."""
    if action.peer is None:
        return None
    return Channel(rank, action.peer) if action.op in SENDS else Channel(action.peer, rank)


class _Message(NamedTuple):
    """The ``number``-th message of ``channel``."""

    channel: Channel
    number: int

    def __str__(self) -> str:
        return f"message {self.number} of channel {self.channel}"


class _Meeting(NamedTuple):
    """The ``number``-th collective of all ranks."""

    number: int

    def __str__(self) -> str:
        return f"collective {self.number}"


class _Run:
    """The programs followed through: each rank goes on until it must wait, and is woken by what it waits for."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._next = [0] * len(programs)
        self._open: list[deque[_Message | _Meeting]] = [deque() for _ in programs]
        self._sent: dict[Channel, int] = {}
        self._received: dict[Channel, int] = {}
        self._met = [0] * len(programs)
        self._posted: Counter[int] = Counter()
        self._stopped: dict[int, tuple[Action, _Message | _Meeting]] = {}

    def to_the_end(self) -> None:
        """Raises :class:`ProgramError` where ranks wait for each other."""
        ready = deque(range(len(self._programs)))
        while ready:
            ready.extend(self._go_on(ready.popleft()))
        if self._stopped:
            raise ProgramError(self._describe())

    def _go_on(self, rank: int) -> list[int]:
        """Follow ``rank`` until it stops; the ranks that this woke."""
        actions, posted = self._programs[rank].actions, self._open[rank]
        woken: list[int] = []
        for index in range(self._next[rank], len(actions)):
            action = actions[index]
            while posted and self._through(posted[0]):
                posted.popleft()
            if posted:
                self._stopped[rank] = action, posted[0]
                break
            channel = _channel(rank, action)
            if channel is not None:
                woken += self._post(rank, channel)
            elif action.op in COLLECTIVES:
                woken += self._meet(rank)
            self._next[rank] = index + 1
        return woken

    def _post(self, rank: int, channel: Channel) -> list[int]:
        """Post ``rank``'s end of the next message of ``channel``; the other rank where this woke it."""
        ends, peer = (self._sent, channel.destination) if rank == channel.source else (self._received, channel.source)
        message = _Message(channel, ends.get(channel, 0))
        ends[channel] = message.number + 1
        self._open[rank].append(message)
        return self._woken([peer])

    def _meet(self, rank: int) -> list[int]:
        """Post ``rank``'s end of its next collective; the others where all have posted theirs and this woke them."""
        collective = _Meeting(self._met[rank])
        self._met[rank] += 1
        self._open[rank].append(collective)
        self._posted[collective.number] += 1
        if self._posted[collective.number] < len(self._programs):
            return []
        return self._woken(self._stopped)

    def _woken(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that need not wait any more."""
        woken = [rank for rank in ranks if rank in self._stopped and self._through(self._stopped[rank][1])]
        for rank in woken:
            del self._stopped[rank]
        return woken

    def _through(self, posted: _Message | _Meeting) -> bool:
        if isinstance(posted, _Meeting):
            return self._posted[posted.number] == len(self._programs)
        channel, number = posted
        return self._sent.get(channel, 0) > number and self._received.get(channel, 0) > number

    def _describe(self) -> str:
        """Follow who waits for whom until a rank comes up again."""
        rank = min(self._stopped)
        seen: list[int] = []
        while rank not in seen and rank in self._stopped:
            seen.append(rank)
            rank = self._missing(rank, self._stopped[rank][1])
        circle = seen[seen.index(rank) :] if rank in seen else seen
        lines = []
        for stopped in circle:
            action, posted = self._stopped[stopped]
            what = str(posted)
            if isinstance(posted, _Meeting):
                what = f"{posted}, which rank {self._missing(stopped, posted)} has not come to"
            lines.append(f"rank {stopped} before {action} for {what}")
        return "ranks wait for each other: " + "; ".join(lines)

    def _missing(self, rank: int, posted: _Message | _Meeting) -> int:
        """A rank that has not posted its end of what ``rank`` waits for."""
        if isinstance(posted, _Meeting):
            return next(other for other, met in enumerate(self._met) if met <= posted.number)
        source, destination = posted.channel
        return source if rank == destination else destination
