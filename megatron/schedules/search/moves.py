"""One climb: carries out moves that are given as data, and accepts or rejects the order that each one makes.

Plain loops over flat arrays, in Python or compiled. Compiled, a whole climb runs without the interpreter lock.

A move list-schedules the order of the passes with some noise, or changes which microbatch is at which position. Rounds
of list scheduling without noise then close the gaps. If microbatches differ, their positions are fixed: each stage runs
them first to last. Gradients are summed in the order of the positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron.schedules.search.forward_backward import Both, Work, settle
from megatron.schedules.search.list_scheduling import EPSILON, Policy


class Move(NamedTuple):
    """A move.

    Args:
        policy: policy of the first round. The other rounds have no noise.
        backwards: run the first round backward in time.
        source, to: position of a microbatch, and where it moves; equal if no microbatch moves.
        swap: swap the two microbatches; the others keep their positions.
    """

    policy: Policy
    backwards: bool = False
    source: int = 0
    to: int = 0
    swap: bool = False


class Rules(NamedTuple):
    """Rules of a climb.

    Args:
        threshold: largest increase of the makespan with which the climb continues from a new order.
        far: no more rounds if the makespan of the first one is above the previous one by more than this.
        most: largest number of backward-forward pairs of rounds without noise. They run while they gain.
        enough: the climb ends with a makespan as short as this.
    """

    threshold: float
    far: float
    most: int
    enough: float = 0.0


class Sizes(NamedTuple):
    """The parts of time and memory that depend on the microbatch at each position; empty if all microbatches are alike.

    Args:
        place: position of the microbatch of each task.
        linear: time of each task that is proportional to the microbatch's tokens.
        attention: time of each task that is proportional to its sum of squared sequence lengths.
        change: memory that each task allocates or frees for the standard microbatch.
        copying: time of each copy for the standard microbatch.
        message: time of each task's messages of experts for the standard microbatch; empty without such messages.
        tokens: relative tokens of each microbatch.
        squares: relative sum of squared sequence lengths of each microbatch.
    """

    place: Any
    linear: Any
    attention: Any
    change: Any
    copying: Any
    message: Any
    tokens: Any
    squares: Any


# No microbatches, for problems where all are alike.
NONE = np.zeros(0, np.int64)
ALIKE = Sizes(NONE, *(np.zeros(0) for _ in range(7)))


class Orders(NamedTuple):
    """Orders of a climb, as arrays that it overwrites.

    Args:
        microbatches: microbatch at each position; empty if all are alike.
        passes: task numbers, rank by rank.
    """

    microbatches: Any
    passes: Any


def put(both: Both, sizes: Sizes, microbatches: Any) -> None:
    """Sets the time and memory of every task for microbatch ``microbatches[k]`` at position k.

    Both directions of time share the arrays of times.
    """
    forward: Any
    backward: Any
    forward, backward, _ = both
    for task in range(len(sizes.place)):
        m = microbatches[sizes.place[task]]
        if sizes.copying[task] > 0:
            forward.copying[task] = backward.copying[task] = sizes.copying[task] * sizes.tokens[m]
        else:
            time = sizes.linear[task] * sizes.tokens[m] + sizes.attention[task] * sizes.squares[m]
            forward.duration[task] = backward.duration[task] = time
        forward.change[task] = sizes.change[task] * sizes.tokens[m]
        backward.change[task] = -forward.change[task]
        if len(sizes.message) > 0:
            forward.message[task] = sizes.message[task] * sizes.tokens[m]


def fits(both: Both, limits: Any, passes: Any) -> bool:
    """Checks that all ranks keep within their limits in this order of passes."""
    first, change = both.forward.first, both.forward.change
    for rank in range(len(first) - 1):
        held = 0.0
        for at in range(first[rank], first[rank + 1]):
            held += change[passes[at]]
            if held > limits[rank] + EPSILON:
                return False
    return True


def copy(source: Any, target: Any) -> None:
    """Overwrites ``target`` with ``source``. Compiling ``target[:] = source`` takes a second."""
    for at in range(len(target)):
        target[at] = source[at]


CALLED = put, fits, copy
"""Functions of this module that :func:`climb` calls."""


def climb(
    both: Both,
    limits: Any,
    sizes: Sizes,
    rules: Rules,
    moves: Any,
    rounds: float,
    work: Work,
    now: Orders,
    length: float,
    best: Orders,
    shortest: float,
) -> tuple[float, float, int, int]:
    """Carries out ``moves`` until they have taken ``rounds`` rounds.

    Args:
        both: the tasks.
        limits: memory limit of each rank.
        sizes: how times and memory depend on microbatches.
        rules: when a new order is accepted.
        moves: the moves, a record array of the fields of :class:`Move`.
        rounds: rounds of list scheduling. The last move may exceed it by a few.
        work: working memory of the rounds.
        now: the current orders, within the limits; overwritten.
        length: makespan of ``now``; infinite to accept the first move.
        best: the shortest orders found; overwritten.
        shortest: makespan of ``best``.

    Returns:
        The makespans of the current and of the shortest orders, the number of rounds, and the number of moves.
    """
    new = Orders(np.empty_like(now.microbatches), np.empty_like(now.passes))
    spent = done = 0
    put(both, sizes, now.microbatches)
    while spent < rounds and done < len(moves) and shortest > rules.enough:
        move = moves[done]
        done += 1
        copy(now.microbatches, new.microbatches)
        moved = move.source != move.to
        if moved:
            if move.swap:
                new.microbatches[move.source] = now.microbatches[move.to]
            else:
                step = 1 if move.to > move.source else -1
                at = move.source
                while at != move.to:
                    new.microbatches[at] = now.microbatches[at + step]
                    at += step
            new.microbatches[move.to] = now.microbatches[move.source]
            put(both, sizes, new.microbatches)
            if not fits(both, limits, now.passes):
                put(both, sizes, now.microbatches)
                spent += 1
                continue
        of = move.policy  # a record, and not the tuple that list scheduling takes
        usual = of.lookahead, of.defer_fillers, of.patience, of.ends_only
        plain = Policy(*usual, 0.0, 0, of.just_in_time)
        noisy = Policy(*usual, of.noise, of.seed, of.just_in_time)
        reached, taken = settle(
            both,
            now.passes,
            limits,
            noisy,
            plain,
            move.backwards,
            rules.most,
            length + rules.far,
            work,
            new.passes,
        )
        spent += taken
        if reached <= length + rules.threshold:
            copy(new.microbatches, now.microbatches)
            copy(new.passes, now.passes)
            length = reached
            if reached < shortest - EPSILON:
                copy(new.microbatches, best.microbatches)
                copy(new.passes, best.passes)
                shortest = reached
        elif moved:
            put(both, sizes, now.microbatches)
    return length, shortest, spent, done
