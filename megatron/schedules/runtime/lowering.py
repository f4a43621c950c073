"""Lowering: a schedule's passes become each rank's program, with every message in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.schedules.planning.kinds import KINDS, Kind
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.schedule import Schedule, gradients_complete
from megatron.schedules.runtime.program import MESSAGES, TAKEN, Action, Channel, Op, Program, ProgramError


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """The program of every rank of ``schedule``, a valid one (:func:`planning.validate.validate`).

    - A result goes out right after the pass that made it.
    - A receive is posted one pass ahead of the pass that uses it, so that the transfer overlaps computing. It is
      posted earlier where the channel brings a later message that is used sooner: receives of a channel stand in
      the order of its sends.
    - The reduction of a stage's gradients starts once they are complete, after what is then sent.

    Hops within a rank need no action. Forward-only schedules lower too. Time is linear in the passes.

    Raises:
        ProgramError: where a result is sent to a rank that never uses it.
    """
    posted = _post_receives(schedule)
    return tuple(
        Program(rank, tuple(_emit(schedule, rank, posted[rank])), schedule.placement, schedule.microbatches)
        for rank in range(len(schedule.order))
    )


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


def _post_receives(schedule: Schedule) -> list[dict[int, list[Action]]]:
    """For each rank, the receives to post before the pass at each index of its row."""
    rank_of, n = schedule.placement.rank_of, schedule.microbatches
    used_at: dict[Kind | Op, list[int]] = {
        message.receive: [-1] * (schedule.placement.stages * n) for message in MESSAGES.values()
    }
    sent: dict[Channel, list[Action]] = {}
    for rank, row in enumerate(schedule.order):
        for index, work in enumerate(row):
            if work.kind in TAKEN:
                used_at[MESSAGES[TAKEN[work.kind]].receive][work.stage * n + work.microbatch] = index
            ends = _sent(work, rank_of)
            if ends is not None:
                sent.setdefault(Channel(rank, rank_of[ends[1].stage]), []).append(ends[1])

    posted: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for channel in sorted(sent):
        used_by = []
        for receive in sent[channel]:
            user = used_at[receive.op][receive.stage * n + receive.microbatch]
            if user < 0:
                raise ProgramError(f"rank {channel.destination} is sent a message for {receive} and never uses it")
            used_by.append(user)
        # Going back from the last message, none may be posted after one that the channel brings later.
        earliest = len(schedule.order[channel.destination])
        for index in reversed(range(len(used_by))):
            earliest = used_by[index] = min(used_by[index], earliest)
        for receive, user in zip(sent[channel], used_by, strict=True):
            posted[channel.destination].setdefault(max(user - 1, 0), []).append(receive)
    return posted


def _emit(schedule: Schedule, rank: int, posted: dict[int, list[Action]]) -> Iterable[Action]:
    row, rank_of = schedule.order[rank], schedule.placement.rank_of
    complete = set(gradients_complete(row).values())
    for index, work in enumerate(row):
        yield from posted.get(index, ())
        yield Action(work.kind, work.stage, work.microbatch)
        ends = _sent(work, rank_of)
        if ends is not None:
            yield ends[0]
        if index in complete:
            yield Action(Op.REDUCE, work.stage, work.microbatch)
