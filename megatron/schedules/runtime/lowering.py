"""Lowering: a schedule's passes become each rank's program, with every message where it can hold nobody up.

Some day a pass waits for its whole device: a timer synchronises, a library is loaded, memory runs short, a script
prints a tensor. It then waits for every message that its rank has posted, and so for other ranks. Programs are made so
that this ends, wherever it happens and however often. All passes of all ranks are put into one line, by the time at
which they are planned to end, each after all that it waits for. A result is sent right after the pass that made it. Its
receive is posted before the first pass of the receiver that stands later in that line. So every wait, for a message to
come or for one to be taken, is for something earlier in the line; and what comes first waits for nothing.

As planned, nothing is lost: when a message is sent its receive is posted already, and the transfer overlaps computing.

Where all ranks share the vocabulary there are collectives of all of them. One has the place in the line of the last
pass that makes a part of it, and every rank posts it where it would post a receive of what that pass makes; so all post
all of them in one order, and the argument is the same. What looks words up is made by no pass, and has the place of the
pass two before the one that takes it: the one between them covers it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.schedules.runtime.program import (
    COLLECTIVES,
    MESSAGES,
    RECEIVES,
    Action,
    Op,
    Program,
    ProgramError,
    collectives_among,
)
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import KINDS
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.schedule import Schedule, gradients_complete
from megatron.schedules.schedule.simulator import sweep
from megatron.schedules.schedule.stage_costs import StageCosts

# How many passes before the one that takes it what is made by no pass is posted.
_AHEAD = 2


def lower(schedule: Schedule, costs: StageCosts | None = None) -> tuple[Program, ...]:
    """The program of every rank of ``schedule``, a valid one (:func:`.validation.validate`).

    Receives of a channel stand in the order of its sends. The reduction of a stage's gradients starts once they are
    complete, after what is then sent. Hops within a rank need no action. Forward-only schedules lower too. Time is
    linear in the passes, but for sorts.

    The embedding's gradient of a microbatch is added up just before that of the next is asked for, the last at the very
    end: nobody waits for it.

    Args:
        schedule: what is lowered.
        costs: what passes are expected to take, where that is not the same for all.

    Raises:
        ProgramError: where a result is sent to a rank that never uses it.
    """
    places = _line(schedule, costs or Costs().on(schedule.placement))
    received, met = _receives(schedule, places), _collectives(schedule, places)
    return tuple(
        Program(
            rank,
            tuple(_emit(schedule, rank, _posts(schedule, rank, received[rank], met), places[rank])),
            schedule.placement,
            schedule.microbatches,
        )
        for rank in range(schedule.ranks)
    )


class _Post(NamedTuple):
    """What a rank posts for passes to come: a receive, or its end of a collective.

    Args:
        made: the place in the line of the pass that makes what it brings, the last where several do.
        turn: among those of one place: 0 for a receive.
        action: what is posted.
    """

    made: int
    turn: int
    action: Action


class _Meeting(NamedTuple):
    """A collective: its place in the line, its turn there, its microbatch."""

    made: int
    turn: int
    microbatch: int
    op: Op


def _line(schedule: Schedule, costs: StageCosts) -> list[list[int]]:
    """For each rank, the places of its passes in the one line of all."""
    swept = sweep(schedule, costs)
    ends, turns = swept.end, swept.turns
    # Of equal times the first in turn: it may be what another waits for.
    passes = (
        (end, turn, rank) for rank in range(schedule.ranks) for end, turn in zip(ends[rank], turns[rank], strict=True)
    )
    places: list[list[int]] = [[] for _ in schedule.order]
    for place, (_, _, rank) in enumerate(sorted(passes)):
        places[rank].append(place)
    return places


def _receives(schedule: Schedule, places: Sequence[Sequence[int]]) -> list[list[_Post]]:
    """For each rank what it receives, in the order in which that is made."""
    rank_of = schedule.placement.rank_of
    found: list[list[_Post]] = [[] for _ in schedule.order]
    for row, line in zip(schedule.order, places, strict=True):
        for work, place in zip(row, line, strict=True):
            ends = _sent(work, rank_of)
            if ends is not None:
                _, receive = ends
                found[rank_of[receive.stage]].append(_Post(place, 0, receive))
    return [sorted(posts) for posts in found]


def _collectives(schedule: Schedule, places: Sequence[Sequence[int]]) -> list[_Meeting]:
    """The collectives of ``schedule``, in the order in which every rank posts them."""
    ops = collectives_among(schedule.kinds)
    if not ops:
        return []
    last = schedule.placement.last_stage
    makes = {kind: [op for op in ops if kind in COLLECTIVES[op].made_by] for kind in schedule.kinds}
    alone = [op for op in ops if not COLLECTIVES[op].made_by]
    takes = {kind: [op for op in alone if kind in COLLECTIVES[op].used_by] for kind in schedule.kinds}
    made: dict[tuple[Op, int], int] = {}
    for row, line in zip(schedule.order, places, strict=True):
        for index, (stage, kind, m) in enumerate(row):
            for op in makes[kind]:
                if COLLECTIVES[op].makers.include(stage, last):
                    made[op, m] = max(line[index], made.get((op, m), 0))
            for op in takes[kind]:
                if COLLECTIVES[op].users.include(stage, last):
                    made[op, m] = line[index - _AHEAD] if index >= _AHEAD else -1
    turns = {op: turn for turn, op in enumerate(ops, 1)}
    return sorted(_Meeting(place, turns[op], m, op) for (op, m), place in made.items())


def _posts(schedule: Schedule, rank: int, receives: Sequence[_Post], meetings: Sequence[_Meeting]) -> Sequence[_Post]:
    """All that ``rank`` posts, in order, and what it does with the embedding's gradients between."""
    stages = schedule.placement.stages_of(rank)
    own: list[_Post] = []
    add: Action | None = None
    for made, turn, m, op in meetings:
        if op is Op.EMBED_BACK:
            if add is not None:
                own.append(_Post(made, turn, add))
            add = Action(Op.ADD, stages[0], m)
        own.append(_Post(made, turn, Action(op, stages[COLLECTIVES[op].chunk], m)))
    if add is not None:
        own.append(_Post(sum(map(len, schedule.order)), 0, add))
    return sorted([*receives, *own], key=lambda post: post[:2]) if own else receives


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


def _emit(schedule: Schedule, rank: int, posts: Sequence[_Post], places: Sequence[int]) -> Iterable[Action]:
    row, rank_of = schedule.order[rank], schedule.placement.rank_of
    complete, posted = set(gradients_complete(row).values()), 0
    last_add = next((post.action for post in posts[-1:] if post.action.op is Op.ADD), None)
    for index, work in enumerate(row):
        due = bisect_left(posts, places[index], lo=posted, key=lambda post: post.made)
        yield from (post.action for post in posts[posted:due])
        posted = due
        yield Action(work.kind, work.stage, work.microbatch)
        ends = _sent(work, rank_of)
        if ends is not None:
            yield ends[0]
        if index in complete and (last_add is None or work.stage != last_add.stage):
            yield Action(Op.REDUCE, work.stage, work.microbatch)
    for _, _, action in posts[posted:]:
        if action.op in RECEIVES:
            raise ProgramError(f"rank {rank} is sent a message for {action} and never uses it")
        yield action
    if last_add is not None:
        yield Action(Op.REDUCE, last_add.stage, last_add.microbatch)
