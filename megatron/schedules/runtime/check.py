"""The checker: proves that the programs of all ranks run to their end together, before any of them starts.

The model is what the transport does. A channel is a directed pair of ranks with its own process group. It
buffers nothing: a message is through when its sender has posted the send and its receiver the receive, and
the k-th send meets the k-th receive. Posting never waits; a pass waits for the receive it uses; a sent tensor
is kept until its message is through. So a rank stops only at a pass whose message has not come.

A stronger model can be asked for. ``single_queue``: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a GPU share
one hardware queue, and a message behind an unfinished one on the same channel keeps back all that is queued after
it. Nearly every plan holds under it, but not each; where the setting is in force, ask.

Where shapes are not known beforehand, a receive goes on the channel only when a pass uses its message or a later
one of the channel (``receives_at_use``). Alone this changes nothing, for a rank stops nowhere else; but it keeps
sends open longer, which matters where something waits for them, as under the stronger model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.schedules.planning.kinds import KINDS, Kind
from megatron.schedules.runtime.program import (
    MESSAGES,
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Op,
    Program,
    ProgramError,
    Slot,
    slot_filled,
    slot_needed,
)


class _Message(NamedTuple):
    """The ``number``-th message of ``channel``."""

    channel: Channel
    number: int


def check(
    programs: Sequence[Program],
    *,
    single_queue: bool = False,
    receives_at_use: bool = False,
) -> None:
    """Prove that ``programs`` end and that both ends of every channel agree on order and meaning.

    Args:
        programs: one for each pipeline rank, in order.
        single_queue: ask for more: that they end even where posting on a channel stops a rank until the
            rank's previous message on that channel is through, as with one hardware queue for all streams of
            a GPU.
        receives_at_use: the transport posts a receive not where the program does but at the pass that uses it, as
            :class:`.variable_transport.VariableTransport` does.

    Time is linear in the actions.

    Raises:
        ProgramError: naming the ranks and actions of what is wrong: a pass without its input, a result never
            used, a send that meets another receive, gradients that are added to after their reduction has started, or
            ranks that wait for each other.
    """
    waits = [_check_rank(rank, program) for rank, program in enumerate(programs)]
    _check_channels(programs)
    _Run(programs, waits, single_queue, receives_at_use).to_the_end()


def _check_rank(rank: int, program: Program) -> dict[int, _Message]:
    """Follow one rank's slots and gradients: the message that the action at an index waits for."""
    if program.rank != rank:
        raise ProgramError(f"the program of rank {program.rank} stands in the place of rank {rank}")
    rank_of, last = program.placement.rank_of, program.placement.last_stage
    held: dict[Slot, _Message | None] = {}
    received: dict[Channel, int] = {}
    waits: dict[int, _Message] = {}
    reduced: dict[int, Action] = {}
    for index, action in enumerate(program.actions):
        op, stage, _, peer = action
        if not 0 <= stage <= last or rank_of[stage] != rank:
            raise ProgramError(f"rank {rank}: {action}: stage {stage} is not on this rank")
        if stage in reduced and (op is Op.REDUCE or (isinstance(op, Kind) and KINDS[op].ends_gradients)):
            raise ProgramError(f"rank {rank}: {action} comes after {reduced[stage]}, which has reduced its gradients")
        if op is Op.REDUCE:
            reduced[stage] = action
        if op in SENDS or op in RECEIVES:
            other = stage + (MESSAGES[SENDS[op]].step if op in SENDS else -MESSAGES[RECEIVES[op]].step)
            if not 0 <= other <= last or rank_of[other] == rank or rank_of[other] != peer:
                raise ProgramError(f"rank {rank}: {action} to or from rank {peer}, where stage {other} is not")
        needed, filled = slot_needed(action, last), slot_filled(action, last)
        if needed is not None:
            if needed not in held:
                raise ProgramError(f"rank {rank}: {action} needs {needed}, which is not there")
            message = held.pop(needed)
            if message is not None:
                if op in SENDS:
                    raise ProgramError(f"rank {rank}: {action} sends on what was only received")
                waits[index] = message
        if filled is not None:
            if filled in held:
                raise ProgramError(f"rank {rank}: {action} gives {filled}, which is already there")
            held[filled] = None
            if op in RECEIVES:
                assert peer is not None
                channel = Channel(peer, rank)
                number = received.get(channel, 0)
                received[channel] = number + 1
                held[filled] = _Message(channel, number)
    if held:
        raise ProgramError(f"rank {rank}: {next(iter(held))} is never used")
    return waits


def _check_channels(programs: Sequence[Program]) -> None:
    """Compare both ends of every channel, message by message."""
    sends: dict[Channel, list[Action]] = {}
    receives: dict[Channel, list[Action]] = {}
    for program in programs:
        for action in program.actions:
            if action.peer is None:
                continue
            if action.op in SENDS:
                sends.setdefault(Channel(program.rank, action.peer), []).append(action)
            else:
                receives.setdefault(Channel(action.peer, program.rank), []).append(action)
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


class _Run:
    """The programs followed through: each rank goes on until it must wait, and is woken by what it waits for."""

    def __init__(
        self,
        programs: Sequence[Program],
        waits: Sequence[Mapping[int, _Message]],
        single_queue: bool,
        receives_at_use: bool,
    ) -> None:
        self._programs = programs
        self._waits = waits
        self._single_queue = single_queue
        self._receives_at_use = receives_at_use
        self._next = [0] * len(programs)
        self._sent: dict[Channel, int] = {}
        self._received: dict[Channel, int] = {}
        self._stopped: dict[int, tuple[Action, _Message]] = {}

    def to_the_end(self) -> None:
        """Raises :class:`ProgramError` where ranks wait for each other."""
        ready = deque(range(len(self._programs)))
        while ready:
            ready.extend(self._go_on(ready.popleft()))
        if self._stopped:
            raise ProgramError(self._describe())

    def _go_on(self, rank: int) -> list[int]:
        """Follow ``rank`` until it stops; the ranks that this woke."""
        actions, waits = self._programs[rank].actions, self._waits[rank]
        woken: list[int] = []
        for index in range(self._next[rank], len(actions)):
            action, needed = actions[index], waits.get(index)
            message = self._message(rank, action)
            if self._single_queue and message is not None and message.number:
                needed = message._replace(number=message.number - 1)
            if self._receives_at_use and needed is not None and rank == needed.channel.destination:
                woken += self._post(rank, needed)
            if needed is not None and not self._through(needed):
                self._stopped[rank] = action, needed
                break
            if message is not None:
                woken += self._post(rank, message)
            self._next[rank] = index + 1
        return woken

    def _message(self, rank: int, action: Action) -> _Message | None:
        """The message that ``action`` would post now, None for a pass and for a receive that its use posts."""
        if action.peer is None:
            return None
        if action.op in SENDS:
            channel = Channel(rank, action.peer)
            return _Message(channel, self._sent.get(channel, 0))
        if self._receives_at_use:
            return None
        channel = Channel(action.peer, rank)
        return _Message(channel, self._received.get(channel, 0))

    def _post(self, rank: int, message: _Message) -> list[int]:
        """Post ``rank``'s end of ``message`` and of all before it on the channel; the other rank where this woke it."""
        source, destination = channel = message.channel
        posted, peer = (self._sent, destination) if rank == source else (self._received, source)
        posted[channel] = max(posted.get(channel, 0), message.number + 1)
        waiting = self._stopped.get(peer)
        if waiting is None or not self._through(waiting[1]):
            return []
        del self._stopped[peer]
        return [peer]

    def _through(self, message: _Message) -> bool:
        channel, number = message
        return self._sent.get(channel, 0) > number and self._received.get(channel, 0) > number

    def _describe(self) -> str:
        """Follow who waits for whom until a rank comes up again."""
        rank = min(self._stopped)
        seen: list[int] = []
        while rank not in seen and rank in self._stopped:
            seen.append(rank)
            channel = self._stopped[rank][1].channel
            rank = channel.source if rank == channel.destination else channel.destination
        circle = seen[seen.index(rank) :] if rank in seen else seen
        lines = []
        for stopped in circle:
            action, message = self._stopped[stopped]
            lines.append(f"rank {stopped} at {action} for message {message.number} of channel {message.channel}")
        return "ranks wait for each other: " + "; ".join(lines)
