"""Lowering: turns a schedule's passes into each rank's program, with every message where it cannot block anybody.

Any pass may come to wait for its whole device: a timer synchronises, a library is loaded, memory runs short. It then
waits for every message that its rank has posted, and so for other ranks. Programs are made so that this always ends.
All passes of all ranks are put into one global order, by planned end, each after all that it waits for. A result is
sent right after the pass that made it. Its receive is posted before the first pass of the receiver that comes later in
the global order. So every wait is for something earlier in that order. As planned, transfers overlap passes.

A collective of vocabulary parallelism has the position of the last pass that computes a part of it, and every rank
posts it where it would post a receive of that pass's result. So all ranks post all collectives in one order. A token
lookup, which needs no pass, has the position two passes before its user, so that the pass between hides it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.schedules.programs.program import (
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
from megatron.schedules.schedule.kinds import KINDS, Pass
from megatron.schedules.schedule.schedule import Schedule, gradients_complete
from megatron.schedules.schedule.simulator import sweep
from megatron.schedules.schedule.stage_costs import StageCosts

# A collective that needs no pass is posted this number of passes before its user.
_AHEAD = 2


def lower(schedule: Schedule, costs: StageCosts | None = None) -> tuple[Program, ...]:
    """Returns the program of every rank of ``schedule``.

    The reduction of a stage's gradients starts when they are complete, after the send that follows. The embedding's
    gradient of a microbatch is added just before that of the next one arrives, and the last one at the very end. Except
    for sorting, the time is linear in the number of passes.

    Args:
        schedule: a valid schedule (:func:`.validation.validate`). It may have forwards only.
        costs: expected times of the passes; None for equal times.

    Raises:
        ProgramError: if a result is sent to a rank that never uses it.
    """
    positions = _global_order(schedule, costs or Costs().on(schedule.placement))
    received, collectives = _receives(schedule, positions), _collectives(schedule, positions)
    return tuple(
        Program(
            rank,
            tuple(_emit(schedule, rank, _posts(schedule, rank, received[rank], collectives), positions[rank])),
            schedule.placement,
            schedule.microbatches,
        )
        for rank in range(schedule.ranks)
    )


class _Post(NamedTuple):
    """A receive, or a rank's end of a collective, which the rank posts for later passes.

    Args:
        position: position in the global order of the pass that makes the result; of the last one, if several do.
        turn: order among posts with the same position; 0 for a receive.
        action: action that is posted.
    """

    position: int
    turn: int
    action: Action


class _Collective(NamedTuple):
    """A collective of all ranks, with its position as in :class:`_Post`."""

    position: int
    turn: int
    microbatch: int
    op: Op


def _global_order(schedule: Schedule, costs: StageCosts) -> list[list[int]]:
    """Returns the positions of each rank's passes in the global order."""
    swept = sweep(schedule, costs)
    # Passes with equal end times keep the order of the sweep, because one may wait for another.
    passes = (
        (end, turn, rank)
        for rank in range(schedule.ranks)
        for end, turn in zip(swept.end[rank], swept.turns[rank], strict=True)
    )
    positions: list[list[int]] = [[] for _ in schedule.order]
    for position, (_, _, rank) in enumerate(sorted(passes)):
        positions[rank].append(position)
    return positions


def _receives(schedule: Schedule, positions: Sequence[Sequence[int]]) -> list[list[_Post]]:
    """Returns the receives of each rank, in the order in which their results are made."""
    rank_of = schedule.placement.rank_of
    by_rank: list[list[_Post]] = [[] for _ in schedule.order]
    for row, own in zip(schedule.order, positions, strict=True):
        for work, position in zip(row, own, strict=True):
            ends = _sent(work, rank_of)
            if ends is not None:
                _, receive = ends
                by_rank[rank_of[receive.stage]].append(_Post(position, 0, receive))
    return [sorted(posts) for posts in by_rank]


def _collectives(schedule: Schedule, positions: Sequence[Sequence[int]]) -> list[_Collective]:
    """Returns the collectives of ``schedule``, in the order in which every rank posts them."""
    ops = collectives_among(schedule.kinds)
    if not ops:
        return []
    last = schedule.placement.last_stage
    makes = {kind: [op for op in ops if kind in COLLECTIVES[op].made_by] for kind in schedule.kinds}
    alone = [op for op in ops if not COLLECTIVES[op].made_by]
    takes = {kind: [op for op in alone if kind in COLLECTIVES[op].used_by] for kind in schedule.kinds}
    made: dict[tuple[Op, int], int] = {}
    for row, own in zip(schedule.order, positions, strict=True):
        for index, (stage, kind, m) in enumerate(row):
            for op in makes[kind]:
                if COLLECTIVES[op].makers.include(stage, last):
                    made[op, m] = max(own[index], made.get((op, m), 0))
            for op in takes[kind]:
                if COLLECTIVES[op].users.include(stage, last):
                    made[op, m] = own[index - _AHEAD] if index >= _AHEAD else -1
    turns = {op: turn for turn, op in enumerate(ops, 1)}
    return sorted(_Collective(position, turns[op], m, op) for (op, m), position in made.items())


def _posts(
    schedule: Schedule, rank: int, receives: Sequence[_Post], collectives: Sequence[_Collective]
) -> Sequence[_Post]:
    """Returns all posts of ``rank`` in order, with the additions of the embedding's gradients between them."""
    stages = schedule.placement.stages_of(rank)
    own: list[_Post] = []
    add: Action | None = None
    for position, turn, m, op in collectives:
        if op is Op.EMBED_BACK:
            if add is not None:
                own.append(_Post(position, turn, add))
            add = Action(Op.ADD, stages[0], m)
        own.append(_Post(position, turn, Action(op, stages[COLLECTIVES[op].chunk], m)))
    if add is not None:
        own.append(_Post(sum(map(len, schedule.order)), 0, add))
    return sorted([*receives, *own], key=lambda post: post[:2]) if own else receives


def _sent(work: Pass, rank_of: Sequence[int]) -> tuple[Action, Action] | None:
    """Returns the send and the receive of the result of ``work``; None if no other rank needs it."""
    result = KINDS[work.kind].makes
    if result is None:
        return None
    message, stage, m = MESSAGES[result], work.stage, work.microbatch
    user = stage + message.step
    if not 0 <= user < len(rank_of) or rank_of[user] == rank_of[stage]:
        return None
    return Action(message.send, stage, m, rank_of[user]), Action(message.receive, user, m, rank_of[stage])


def _emit(schedule: Schedule, rank: int, posts: Sequence[_Post], positions: Sequence[int]) -> Iterable[Action]:
    row, rank_of = schedule.order[rank], schedule.placement.rank_of
    complete, posted = set(gradients_complete(row).values()), 0
    last_add = next((post.action for post in posts[-1:] if post.action.op is Op.ADD), None)
    for index, work in enumerate(row):
        due = bisect_left(posts, positions[index], lo=posted, key=lambda post: post.position)
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
