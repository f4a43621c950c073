"""Search for an order of microbatches of different sizes, and for the order of their passes.

It uses plain loops over flat arrays, which work the same in Python and numba. During training it is a few calls of
compiled code, each of which releases the interpreter lock. It is limited by a number of rounds and not by time, so
every rank finds the same result.

The positions of microbatches are fixed: each stage runs them first to last. The search changes which microbatch is at
which position, and when the passes of the positions run. Gradients are summed in the order of the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.schedules.schedule.microbatch_loads import MicrobatchLoads
from megatron.schedules.search.forward_backward import Both, Work, one_round, settle
from megatron.schedules.search.list_scheduling import EPSILON, NEVER, Policy

# Values that a climb chooses from: patience, and the probability that ranks defer weight gradients.
_PATIENCE = (0.0, 0.0, 0.5, 0.6, 1.0)
_DEFER = 0.15
# Share of moves that move microbatches, and share of these that swap two. The others move one to another position.
_MOVES, _SWAPS = 0.7, 0.6
_NOISE = 0.02
# Backward-forward rounds run while they gain, and at most this number.
_INNER = 3
# Such rounds run only if the makespan is at most this number of thresholds above the previous one.
_FAR = 4


class Places(NamedTuple):
    """The tasks in arrays, and the part of each that depends on the microbatch at its position.

    Args:
        both: the tasks. Both directions of time share the arrays of times.
        place: position of the microbatch of each task.
        linear: time of each task that is proportional to the microbatch's tokens.
        attention: time of each task that is proportional to its sum of squared sequence lengths.
        change: memory that each task allocates or frees for the standard microbatch.
        copying: time of each copy for the standard microbatch.
        limits: memory limit of each rank.
    """

    both: Both
    place: Any
    linear: Any
    attention: Any
    change: Any
    copying: Any
    limits: Any


def put(places: Places, order: Any, tokens: Any, squares: Any) -> None:
    """Sets the time and memory of every task for microbatch ``order[k]`` at position k."""
    forward: Any
    backward: Any
    forward, backward, _ = places.both
    for task in range(len(places.place)):
        m = order[places.place[task]]
        if places.copying[task] > 0:
            forward.copying[task] = backward.copying[task] = places.copying[task] * tokens[m]
        else:
            time = places.linear[task] * tokens[m] + places.attention[task] * squares[m]
            forward.duration[task] = backward.duration[task] = time
        forward.change[task] = places.change[task] * tokens[m]
        backward.change[task] = -forward.change[task]


def fits(places: Places, passes: Any) -> bool:
    """Checks that all ranks keep within their limits in this order of passes."""
    first, change = places.both.forward.first, places.both.forward.change
    for rank in range(len(first) - 1):
        held = 0.0
        for at in range(first[rank], first[rank + 1]):
            held += change[passes[at]]
            if held > places.limits[rank] + EPSILON:
                return False
    return True


def climb(
    places: Places,
    work: Work,
    tokens: Any,
    squares: Any,
    order: Any,
    passes: Any,
    length: float,
    rounds: int,
    lookahead: int,
    threshold: float,
    seed: int,
    best_order: Any,
    best_passes: Any,
) -> tuple[float, float]:
    """Runs ``rounds`` rounds from ``order`` and ``passes``, which are overwritten with the current orders at the end.

    Each move swaps or moves microbatches, or changes the order of passes by a little noise. The climb continues from
    the result unless it is clearly longer.

    Args:
        places: the tasks.
        work: working memory of the rounds.
        tokens: relative tokens of each microbatch.
        squares: relative sum of squared sequence lengths of each microbatch.
        order: order of the microbatches.
        passes: order of the passes, within the limits.
        length: makespan of both orders; :data:`NEVER` for the first call.
        rounds: rounds of list scheduling. The last move may exceed it by a few.
        lookahead: passes that a rank considers.
        threshold: largest increase of the makespan with which a new order is accepted.
        seed: random seed.
        best_order, best_passes: overwritten with the shortest orders found.

    Returns:
        The makespans of the shortest and of the current orders.
    """
    n = len(order)
    new_order, new_passes = np.empty_like(order), np.empty_like(passes)
    put(places, order, tokens, squares)
    state, spent, never = seed, 0, 0 > 1
    if length >= NEVER:
        start = passes.copy()
        for patience in (0.0, 1.0):
            policy = Policy(lookahead, never, patience, never, 0.0, state, never)
            reached = one_round(places.both, start, places.limits, policy, never, work, new_passes)
            if reached < length - EPSILON:
                length, passes[:] = reached, new_passes
        spent = 2
    best = length
    best_order[:], best_passes[:] = order, passes
    draws = np.empty(6)
    while spent < rounds:
        for at in range(6):
            state = (state * 1103515245 + 12345) % 2147483648
            draws[at] = (state // 256) / 8388608.0
        patience = _PATIENCE[int(draws[0] * 5)]
        plain = Policy(lookahead, draws[1] < _DEFER, patience, never, 0.0, state, never)
        policy, backwards = plain, never
        new_order[:] = order
        moved = n > 1 and draws[2] < _MOVES
        if moved:
            one, two = int(draws[3] * n), int(draws[4] * (n - 1))
            if two >= one:
                two += 1
            if draws[5] < _SWAPS:
                new_order[one], new_order[two] = order[two], order[one]
            else:
                step = 1 if two > one else -1
                at = one
                while at != two:
                    new_order[at] = order[at + step]
                    at += step
                new_order[two] = order[one]
            put(places, new_order, tokens, squares)
            if not fits(places, passes):
                put(places, order, tokens, squares)
                spent += 1
                continue
        else:
            policy = Policy(lookahead, draws[1] < _DEFER, patience, never, _NOISE * draws[3], state, never)
            backwards = draws[4] < 0.5
        worth = length + _FAR * threshold
        reached, taken = settle(
            places.both, passes, places.limits, policy, plain, backwards, _INNER, worth, work, new_passes
        )
        spent += taken
        if reached <= length + threshold:
            order[:], passes[:], length = new_order, new_passes, reached
            if reached < best - EPSILON:
                best_order[:], best_passes[:], best = order, passes, reached
        elif moved:
            put(places, order, tokens, squares)
    return best, length


class Found(NamedTuple):
    """State of one climb: its current orders and the shortest ones.

    Args:
        seed: random seed.
        order: order of the microbatches.
        passes: order of the passes.
        length: makespan.
        best_order, best_passes, best: the same of the shortest.
    """

    seed: int
    order: Any
    passes: Any
    length: float
    best_order: Any
    best_passes: Any
    best: float


def search(
    run: Callable[..., tuple[float, float]],
    places: Places,
    work: Work,
    loads: MicrobatchLoads,
    orders: Sequence[Sequence[int]],
    rounds: int,
    lookahead: int,
    threshold: float,
) -> Found | None:
    """Returns the shortest order of microbatches and of passes that the search finds in ``rounds`` rounds.

    A climb starts from each order of microbatches, with the passes in the order of their numbers. Half of the climbs
    continue, then half of these, until one is left. Each part of the search has the same number of rounds in total.

    Args:
        run: :func:`climb`, or its compiled code.
        places: the tasks.
        work: working memory of the rounds, as ``run`` needs it.
        loads: sizes of the microbatches.
        orders: orders of microbatches to start from. Those that do not fit within the limits are skipped.
        rounds: rounds of list scheduling in total.
        lookahead, threshold: see :func:`climb`.

    Returns:
        The best climb; None if none of ``orders`` fits.
    """
    tokens, squares, passes = np.array(loads.tokens), np.array(loads.squares), np.arange(len(places.place))
    running = []
    for seed, each in enumerate(orders):
        order = np.array(each)
        put(places, order, tokens, squares)
        if fits(places, passes):
            start = passes.copy()
            running.append(Found(seed, order, start, NEVER, order.copy(), start.copy(), NEVER))
    sizes = [size for size in (8, 4, 2, 1) if size <= max(1, len(running))]
    for part, size in enumerate(sizes):
        running = sorted(running, key=lambda each: each.best)[:size]
        each_gets = rounds // len(sizes) // size
        for at, now in enumerate(running):
            order, found = np.empty_like(now.order), np.empty_like(now.passes)
            arguments = now.order, now.passes, now.length, each_gets, lookahead, threshold, 8 * part + now.seed
            best, length = run(places, work, tokens, squares, *arguments, order, found)
            if best < now.best - EPSILON:
                now = now._replace(best=best, best_order=order, best_passes=found)
            running[at] = now._replace(length=length)
    return min(running, key=lambda each: each.best, default=None)
