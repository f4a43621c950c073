"""Rounds of list scheduling in both directions of time: the basic move of every climb.

Plain loops over flat sequences, on lists in Python or on arrays in compiled code, as :func:`.list_schedule` itself.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from megatron.schedules.search.list_scheduling import EPSILON, Instance, Policy, Space, list_schedule, set_left


class Both(NamedTuple):
    """The tasks in both directions of time.

    Args:
        forward: the tasks.
        backward: the same tasks with time running backwards.
        turned: for each position in a reversed order, the position in the order itself, and vice versa.
    """

    forward: Instance
    backward: Instance
    turned: Sequence[int]


class Work(NamedTuple):
    """Working memory of rounds: lists, or arrays for compiled code.

    Args:
        space: working memory of list scheduling.
        base: a reversed order.
        other: an order that may be shorter.
    """

    space: Space
    base: MutableSequence[int]
    other: MutableSequence[int]


def one_round(
    both: Both,
    order: Sequence[int],
    limits: Sequence[float],
    policy: Policy,
    backwards: bool,
    work: Work,
    result: MutableSequence[int],
) -> float:
    """List-schedules ``order`` into ``result``, which may be the same sequence. Returns the makespan.

    With ``backwards``, time runs from the end to the beginning, so passes move towards the end. A W then takes what
    runs behind no message in ``order``. Forward, what runs behind messages follows from the choices.
    """
    set_left(both.forward, order, backwards, work.space.left, work.space.due)
    turned, size = both.turned, len(order)
    tasks, target = (both.backward, work.base) if backwards else (both.forward, result)
    target[:] = order
    if backwards:
        for at in range(size):
            target[at] = order[turned[at]]
    length = list_schedule(tasks, target, limits, policy, work.space, target)
    if backwards:
        for at in range(size):
            result[at] = target[turned[at]]
    return length


def settle(
    both: Both,
    order: Sequence[int],
    limits: Sequence[float],
    first: Policy,
    plain: Policy,
    backwards: bool,
    most: int,
    worth: float,
    work: Work,
    result: MutableSequence[int],
) -> tuple[float, int]:
    """Runs one round on ``order``, then rounds backward and forward while they gain (forward-backward improvement).

    Args:
        both: the tasks.
        order: the start, within ``limits``.
        limits: memory limit of each rank, in microbatches.
        first: policy of the first round.
        plain: policy of all other rounds.
        backwards: run the first round backward, then a plain one forward.
        most: largest number of backward-forward pairs after that.
        worth: no more rounds if the makespan of the first is above this.
        work: working memory, overwritten.
        result: resulting order, overwritten.

    Returns:
        The makespan of ``result`` and the number of rounds.
    """
    # The only call of list scheduling: compiled code inlines it here once.
    source, target, policy = order, result, first
    rounds, shortest, reached = 0, 0.0, False
    while True:
        length = one_round(both, source, limits, policy, backwards, work, target)
        rounds += 1
        if backwards:
            source, policy, backwards = target, plain, False
            continue
        if reached:
            if length > shortest - EPSILON:
                return shortest, rounds
            result[:] = target
        reached, shortest = True, length
        if most == 0 or length > worth:
            return shortest, rounds
        most -= 1
        source, target, policy, backwards = result, work.other, plain, True
