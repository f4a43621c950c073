"""Lowering: a schedule's passes become each rank's program, with every message in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.runtime.program import Action, Channel, Op, Program, ProgramError

_OP = {Kind.F: Op.F, Kind.I: Op.I, Kind.W: Op.W, Kind.B: Op.B}


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """The program of every rank of ``schedule``, a valid one (:func:`planning.validate.validate`).

    - A result goes out right after the pass that made it.
    - A receive is posted one pass ahead of the pass that uses it, so that the transfer overlaps computing, or
      earlier where a later message of the same channel overtakes it: receives of a channel stand in the
      sender's order.
    - An I whose W follows with no message between becomes one whole backward, B. Where the input gradient is
      sent, the two stay apart: as one they would keep the receiver waiting for the W.

    Hops within a rank need no action. Forward-only schedules lower too. Time is linear in the passes.

    Raises:
        ProgramError: where a result is sent to a rank that never uses it.
    """
    rank_of = schedule.placement.rank_of
    rows = [_fuse(row, rank_of) for row in schedule.order]
    posted = _post_receives(schedule, rows)
    return tuple(
        Program(rank, tuple(_emit(row, posted[rank], rank_of)), schedule.placement, schedule.microbatches)
        for rank, row in enumerate(rows)
    )


def _fuse(row: Sequence[Pass], rank_of: Sequence[int]) -> list[Pass]:
    """``row`` with every I directly followed by its own W made a B, unless its gradient leaves the rank."""
    fused: list[Pass] = []
    for work in row:
        ahead = Pass(work.stage, Kind.I, work.microbatch)
        if work.kind is Kind.W and fused and fused[-1] == ahead and _sent_to(ahead, rank_of) is None:
            fused[-1] = Pass(work.stage, Kind.B, work.microbatch)
        else:
            fused.append(work)
    return fused


def _sent_to(work: Pass, rank_of: Sequence[int]) -> int | None:
    """The other rank that needs the result of ``work``, if any."""
    if work.kind is Kind.W:
        return None
    user = work.stage + 1 if work.kind is Kind.F else work.stage - 1
    if not 0 <= user < len(rank_of) or rank_of[user] == rank_of[work.stage]:
        return None
    return rank_of[user]


def _post_receives(schedule: Schedule, rows: Sequence[Sequence[Pass]]) -> list[dict[int, list[Action]]]:
    """For each rank, the receives to post before the pass at each index of its row."""
    rank_of, n = schedule.placement.rank_of, schedule.microbatches
    forward_at = [-1] * (schedule.placement.stages * n)
    backward_at = list(forward_at)
    sent: dict[Channel, list[Action]] = {}
    for rank, row in enumerate(rows):
        for index, work in enumerate(row):
            if work.kind is not Kind.W:
                at = forward_at if work.kind is Kind.F else backward_at
                at[work.stage * n + work.microbatch] = index
            peer = _sent_to(work, rank_of)
            if peer is not None:
                receive = (
                    Action(Op.RECV_F, work.stage + 1, work.microbatch, rank)
                    if work.kind is Kind.F
                    else Action(Op.RECV_B, work.stage - 1, work.microbatch, rank)
                )
                sent.setdefault(Channel(rank, peer), []).append(receive)

    posted: list[dict[int, list[Action]]] = [{} for _ in rows]
    for channel in sorted(sent):
        used_by = []
        for receive in sent[channel]:
            at = forward_at if receive.op is Op.RECV_F else backward_at
            user = at[receive.stage * n + receive.microbatch]
            if user < 0:
                raise ProgramError(f"rank {channel.destination} is sent a message for {receive} and never uses it")
            used_by.append(user)
        # Going back from the last message, none may be posted after one that the channel brings later.
        earliest = len(rows[channel.destination])
        for index in reversed(range(len(used_by))):
            earliest = used_by[index] = min(used_by[index], earliest)
        for receive, user in zip(sent[channel], used_by, strict=True):
            posted[channel.destination].setdefault(max(user - 1, 0), []).append(receive)
    return posted


def _emit(row: Sequence[Pass], posted: dict[int, list[Action]], rank_of: Sequence[int]) -> Iterable[Action]:
    for index, work in enumerate(row):
        yield from posted.get(index, ())
        yield Action(_OP[work.kind], work.stage, work.microbatch)
        peer = _sent_to(work, rank_of)
        if peer is not None:
            yield Action(Op.SEND_F if work.kind is Kind.F else Op.SEND_B, work.stage, work.microbatch, peer)
