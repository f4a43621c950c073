"""The checker: proves that the programs of all ranks run to their end together, before any of them starts.

The model is the strictest possible. A channel buffers nothing: a message is complete when its sender has posted the
send and its receiver the receive, and the k-th send matches the k-th receive. A collective is complete when all ranks
have posted it. Before every action a rank waits until all that it has posted is complete.

Collectives inside passes, of tensor, context and expert parallelism, join ranks of other pipelines at the same place,
which have the same program. They come in the order of its passes, so they match, and no rank of a group waits for what
another one does later. So they cause no deadlock. Before training and before each new plan, all ranks compare plans.

No transport here waits so often. But a rank may wait for its whole device in any pass; with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) all that is queued waits for the messages before it; and where shapes are not known
beforehand hosts wait for each other. A program that ends under this model ends wherever any of that happens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import (
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
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts


def proved(schedule: Schedule, costs: StageCosts) -> tuple[Program, ...]:
    """Returns the program of each rank of ``schedule``, proved to end.

    Raises:
        ProgramError: as :func:`check`.
    """
    programs = lower(schedule, costs)
    check(programs)
    return programs


def check(programs: Sequence[Program]) -> None:
    """Proves that ``programs`` end, and that both ends of every message and collective agree on order and meaning.

    Args:
        programs: one for each pipeline rank, in order.

    Raises:
        ProgramError: names the ranks and actions at fault: a pass without its input, an unused result, a send that
            matches another receive, ranks in different collectives, a collective without a rank's part, gradients added
            after their reduction has started, or ranks that wait for each other.
    """
    for rank, program in enumerate(programs):
        _check_rank(rank, program)
    _check_channels(programs)
    _check_collectives(programs)
    _Simulation(programs).to_the_end()


def _check_rank(rank: int, program: Program) -> None:
    """Checks one rank's slots and gradients."""
    if program.rank != rank:
        raise ProgramError(f"the program of rank {program.rank} was given for rank {rank}")
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
    """Checks that each collective is written with the right stage, after the pass that computes this rank's part."""
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
            raise ProgramError(
                f"rank {program.rank}: {action} comes before {made}, which computes this rank's part of it"
            )


def _check_collectives(programs: Sequence[Program]) -> None:
    """Checks that all ranks post the same collectives in one order, each once, and have their part of each."""
    present = {action.op for program in programs for action in program.actions}
    expected = {*collectives_among(present), *(op for op in COLLECTIVES if op in present)}
    rows = [[action for action in program.actions if action.op in COLLECTIVES] for program in programs]
    for number, collective in enumerate(zip_longest(*rows)):
        for rank, action in enumerate(collective):
            if action is None or collective[0] is None or action[::2] != collective[0][::2]:
                posts = [f"rank {r} posts {collective[r] or 'none'}" for r in (0, rank)]
                raise ProgramError(f"collective {number}: {' and '.join(posts)}")
    posted = Counter((action.op, action.microbatch) for action in rows[0])
    for op in sorted(expected):
        for m in range(programs[0].microbatches):
            if posted[op, m] != 1:
                raise ProgramError(f"{op} of microbatch {m} is there {posted[op, m]} times instead of once")
    for program in programs if expected else ():
        _check_parts(program)


def _check_channels(programs: Sequence[Program]) -> None:
    """Checks both ends of every channel, message by message."""
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
    """Returns the channel of a send or receive; None for all else."""
    if action.peer is None:
        return None
    return Channel(rank, action.peer) if action.op in SENDS else Channel(action.peer, rank)


class _Posted(NamedTuple):
    """The ``number``-th message of a channel, or the ``number``-th collective of all ranks (channel None)."""

    channel: Channel | None
    number: int

    def __str__(self) -> str:
        if self.channel is None:
            return f"collective {self.number}"
        return f"message {self.number} of channel {self.channel}"


class _Simulation:
    """Simulation of the programs. A rank runs until it must wait, and goes on when what it waits for is complete."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._next = [0] * len(programs)
        self._open: list[deque[_Posted]] = [deque() for _ in programs]
        self._numbers: Counter[tuple[int, Channel | None]] = Counter()
        self._ends: Counter[_Posted] = Counter()
        self._stopped: dict[int, tuple[Action, _Posted]] = {}

    def to_the_end(self) -> None:
        """Runs all programs; raises :class:`ProgramError` if ranks wait for each other."""
        ready = deque(range(len(self._programs)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        if self._stopped:
            raise ProgramError(self._describe())

    def _advance(self, rank: int) -> list[int]:
        """Runs ``rank`` until it must wait. Returns the ranks that can go on because of it."""
        actions, posted = self._programs[rank].actions, self._open[rank]
        woken: list[int] = []
        for index in range(self._next[rank], len(actions)):
            action = actions[index]
            while posted and self._complete(posted[0]):
                posted.popleft()
            if posted:
                self._stopped[rank] = action, posted[0]
                break
            channel = _channel(rank, action)
            if channel is not None or action.op in COLLECTIVES:
                woken += self._post(rank, channel)
            self._next[rank] = index + 1
        return woken

    def _post(self, rank: int, channel: Channel | None) -> list[int]:
        """Posts the next message of ``channel`` or collective. Returns the ranks that waited for it and can go on."""
        posted = _Posted(channel, self._numbers[rank, channel])
        self._numbers[rank, channel] += 1
        self._ends[posted] += 1
        self._open[rank].append(posted)
        if not self._complete(posted):
            return []
        woken = [other for other in self._ranks(posted) if other in self._stopped and self._stopped[other][1] == posted]
        for other in woken:
            del self._stopped[other]
        return woken

    def _ranks(self, posted: _Posted) -> Sequence[int]:
        """Returns the ranks that take part."""
        return range(len(self._programs)) if posted.channel is None else posted.channel

    def _complete(self, posted: _Posted) -> bool:
        return self._ends[posted] == len(self._ranks(posted))

    def _missing(self, posted: _Posted) -> int:
        """Returns a rank that has not posted its end."""
        return next(rank for rank in self._ranks(posted) if self._numbers[rank, posted.channel] <= posted.number)

    def _describe(self) -> str:
        """Returns the circle of ranks that wait for each other, as a sentence."""
        rank = min(self._stopped)
        seen: list[int] = []
        while rank not in seen and rank in self._stopped:
            seen.append(rank)
            rank = self._missing(self._stopped[rank][1])
        circle = seen[seen.index(rank) :] if rank in seen else seen
        lines = []
        for stopped in circle:
            action, posted = self._stopped[stopped]
            joins = f", which rank {self._missing(posted)} has not joined" if posted.channel is None else ""
            lines.append(f"rank {stopped} before {action} for {posted}{joins}")
        return "ranks wait for each other: " + "; ".join(lines)
