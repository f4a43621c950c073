"""Rounds of list scheduling in both directions of time: the one move of every climb.

Plain loops over flat sequences, on lists in Python or on arrays as machine code, as :func:`.list_schedule` itself.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from megatron.schedules.search.list_scheduling import EPSILON, Instance, Policy, Space, list_schedule


class Both(NamedTuple):
    """The tasks in both directions of time.

    Args:
        forward, backward: the tasks, and the same with time running backwards.
        turned: for each place of an order read backwards, the place in the order itself; the other way round, too.
    """

    forward: Instance
    backward: Instance
    turned: Sequence[int]


class Work(NamedTuple):
    """What rounds write while they run: lists, or arrays for machine code.

    Args:
        space: of list scheduling.
        base: an order read backwards.
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
    found: MutableSequence[int],
) -> float:
    """List scheduling of ``order`` into ``found``, which may be the same; the makespan.

    Where it goes ``backwards``, from the end to the beginning: passes move towards the end.
    """
    turned, size = both.turned, len(order)
    tasks, target = (both.backward, work.base) if backwards else (both.forward, found)
    for at in range(size):
        target[at] = order[turned[at] if backwards else at]
    length = list_schedule(tasks, target, limits, policy, work.space, target)
    if backwards:
        for at in range(size):
            found[at] = target[turned[at]]
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
    found: MutableSequence[int],
) -> tuple[float, int]:
    """One round of ``order``, then rounds backward and forward in turn while they gain (forward-backward improvement).

    Args:
        both: the tasks.
        order: where it starts; within ``limits``.
        limits: the most each rank may hold.
        first, plain: how ranks choose in the first round, and in all others.
        backwards: whether the first round goes backward; a plain one forward follows.
        most: so many times backward and forward at most.
        worth: an order that is longer after the first rounds is left as it is.
        work: overwritten.
        found: the order, overwritten.

    Returns:
        Its makespan, and how many rounds that took.
    """
    # One place calls list scheduling: machine code has it once, and in place of the call.
    source, target, policy = order, found, first
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
            for at in range(len(found)):
                found[at] = target[at]
        reached, shortest = True, length
        if most == 0 or length > worth:
            return shortest, rounds
        most -= 1
        source, target, policy, backwards = found, work.other, plain, True
