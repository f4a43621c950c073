"""Weight gradients that run while messages of experts travel.

F, I and R of layers with experts wait for such messages. Meanwhile their rank computes weight gradients that are due,
and the W pass does the rest. The order of a rank's passes alone says which ones, so every rank knows without asking
others:

- Those of the W passes that come next, in order, as long as each has had its I.
- Neither the last W of a stage nor any W after it: data-parallel reductions of the stage's gradients start in it.
- None beyond a B that comes before: it adds to the same gradients.

A W can be divided anywhere here. A job divides it between linear layers. F, I and R take as long as before. A W that is
hidden entirely is still a pass, which takes no time. Its activation memory counts until that pass, although a job frees
the memory of each linear layer earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.schedules.schedule.kinds import KINDS, Kind, Pass
from megatron.schedules.schedule.stage_costs import StageCosts


class Hiding(NamedTuple):
    """Result of :func:`hide` for each pass of a rank, in order.

    Args:
        durations: time that the pass takes: of a W, what ran behind no message.
        hidden: time of its messages in which weight gradients run. The rest of its messages is exposed.
    """

    durations: Sequence[float]
    hidden: Sequence[float]


class Piece(NamedTuple):
    """Weight gradients that run behind the messages of one pass.

    Args:
        behind: index of the pass with the messages, in the rank's row.
        of: index of the W whose gradients these are.
        time: time of these gradients.
    """

    behind: int
    of: int
    time: float


def hide(row: Sequence[Pass], costs: StageCosts) -> Hiding:
    """Returns the durations of a rank's passes and what their messages hide. Linear in the number of passes."""
    left, hidden = costs.durations_of(row), [0.0] * len(row)
    for behind, of, time in pieces(row, costs):
        left[of] -= time
        hidden[behind] += time
    return Hiding(left, hidden)


def pieces(row: Sequence[Pass], costs: StageCosts) -> Iterator[Piece]:
    """Yields the weight gradients of a rank that run behind messages, in order."""
    if not costs.has_messages:
        return
    left, messages = costs.durations_of(row), costs.messages_of(row)
    coming = [index for index, work in enumerate(row) if Kind.W in (work.kind, *KINDS[work.kind].parts)]
    last = {row[index].stage: index for index in coming}
    due: set[tuple[int, int]] = set()
    turn = 0  # the next of ``coming`` with something left
    for index, (stage, kind, m) in enumerate(row):
        message = messages[index]
        while turn < len(coming) and message > 0:
            of = coming[turn]
            other = row[of]
            if other.kind is not Kind.W or of == last[other.stage] or (other.stage, other.microbatch) not in due:
                break
            time = min(message, left[of])
            if time > 0:
                yield Piece(index, of, time)
            message -= time
            left[of] -= time
            turn += not left[of]
        if kind is Kind.I:
            due.add((stage, m))
        if turn < len(coming) and coming[turn] == index:
            turn += 1
