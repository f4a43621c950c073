"""Lowering: a schedule's passes become each rank's program, with every message where it can hold nobody up.

Some day a pass waits for its whole device: a timer synchronises, a library is loaded, memory runs short, a script
prints a tensor. It then waits for every message that its rank has posted, and so for other ranks. Programs are made so
that this ends, wherever it happens and however often. All passes of all ranks are put into one line, by the time at
which they are planned to end, each after all that it waits for. A result is sent right after the pass that made it. Its
receive is posted before the first pass of the receiver that stands later in that line. So every wait, for a message to
come or for one to be taken, is for something earlier in the line; and what comes first waits for nothing.

As planned, nothing is lost: when a message is sent its receive is posted already, and the transfer overlaps computing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.schedules.planning.costs import Costs, StageCosts
from megatron.schedules.planning.kinds import KINDS
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.schedule import Schedule, gradients_complete
from megatron.schedules.planning.simulate import sweep
from megatron.schedules.runtime.program import MESSAGES, Action, Op, Program, ProgramError


def lower(schedule: Schedule, costs: StageCosts | None = None) -> tuple[Program, ...]:
    """The program of every rank of ``schedule``, a valid one (:func:`planning.validate.validate`).

    Receives of a channel stand in the order of its sends. The reduction of a stage's gradients starts once they are
    complete, after what is then sent. Hops within a rank need no action. Forward-only schedules lower too. Time is
    linear in the passes, but for one sort.

    Args:
        schedule: what is lowered.
        costs: what passes are expected to take, where that is not the same for all.

    Raises:
        ProgramError: where a result is sent to a rank that never uses it.
    """
    places = _line(schedule, costs or Costs().on(schedule.placement))
    received = _receives(schedule, places)
    return tuple(
        Program(
            rank, tuple(_emit(schedule, rank, received[rank], places[rank])), schedule.placement, schedule.microbatches
        )
        for rank in range(schedule.ranks)
    )


class _Receive(NamedTuple):
    """A receive, and the place in the line of the pass that makes what it receives."""

    made: int
    action: Action


def _line(schedule: Schedule, costs: StageCosts) -> list[list[int]]:
    """For each rank, the places of its passes in the one line of all."""
    _, ends, turns = sweep(schedule, costs)
    done = [0] * schedule.ranks
    passes: list[tuple[float, int, int]] = []
    for turn, rank in enumerate(turns):
        # Of equal times the first in turn: it may be what another waits for.
        passes.append((ends[rank][done[rank]], turn, rank))
        done[rank] += 1
    places: list[list[int]] = [[] for _ in schedule.order]
    for place, (_, _, rank) in enumerate(sorted(passes)):
        places[rank].append(place)
    return places


def _receives(schedule: Schedule, places: Sequence[Sequence[int]]) -> list[list[_Receive]]:
    """For each rank what it receives, in the order in which that is made."""
    rank_of = schedule.placement.rank_of
    found: list[list[_Receive]] = [[] for _ in schedule.order]
    for row, line in zip(schedule.order, places, strict=True):
        for work, place in zip(row, line, strict=True):
            ends = _sent(work, rank_of)
            if ends is not None:
                _, receive = ends
                found[rank_of[receive.stage]].append(_Receive(place, receive))
    return [sorted(receives) for receives in found]


def _sent(work: Pass, rank_of: Sequence[int]) -> tuple[Action, Action] | None:
    """The send and the receive of what ``work`` makes, where another rank needs it."""
    result = KINDS[work.kind].makes
    if result is None:
        return None
    message, stage, m = MESSAGES[result], work.stage, work.microbatch
    user = stage + message.step
    if not 0 <= user < len(rank_of) or rank_of[user] == rank_of[stage]:
        return None
    return Action(message.send, stage, m, rank_of[user]), Action(message.receive, user, m, rank_of[stage])


def _emit(schedule: Schedule, rank: int, receives: Sequence[_Receive], places: Sequence[int]) -> Iterable[Action]:
    row, rank_of = schedule.order[rank], schedule.placement.rank_of
    complete, posted = set(gradients_complete(row).values()), 0
    for index, work in enumerate(row):
        due = bisect(receives, places[index], lo=posted, key=lambda receive: receive.made)
        yield from (receive.action for receive in receives[posted:due])
        posted = due
        yield Action(work.kind, work.stage, work.microbatch)
        ends = _sent(work, rank_of)
        if ends is not None:
            yield ends[0]
        if index in complete:
            yield Action(Op.REDUCE, work.stage, work.microbatch)
    if posted < len(receives):
        raise ProgramError(f"rank {rank} is sent a message for {receives[posted].action} and never uses it")
