"""The search for an order of microbatches that are not alike, and for the order of their passes.

Plain loops over flat arrays, which Python and numba take alike: at run time it is a few calls of machine code, each of
which leaves the interpreter to the iteration under way. A number of rounds bounds it, never a time, so every rank finds
the same.

Microbatches keep to their places: each stage does them first to last, whatever passes come between. What moves is which
microbatch has which place, and when passes of the places run. So gradients are added up in the order of the places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.schedules.schedule.microbatch_loads import MicrobatchLoads
from megatron.schedules.search.forward_backward import Both, Work, one_round, settle
from megatron.schedules.search.list_scheduling import EPSILON, NEVER, Policy

# A climb's choices: how far ranks look, whether they put off weight gradients, how long they wait for what is due.
_PATIENCE = (0.0, 0.0, 0.5, 0.6, 1.0)
_DEFER = 0.15
# Of a climb's moves, those that move microbatches; of these, those that exchange two, the rest moving one elsewhere.
_MOVES, _SWAPS = 0.7, 0.6
_NOISE = 0.02
# As long as rounds there and back gain, and so often at most.
_INNER = 3
# How much longer than before, in thresholds, an order may be that these are tried on.
_FAR = 4


class Places(NamedTuple):
    """The tasks by place, in arrays: what is scheduled, and what of it depends on the microbatch in a place.

    Args:
        both: the tasks. Times are in arrays that both directions share.
        place: of each task, the place of its microbatch.
        linear, attention: of each task, the time that goes with tokens, and that which goes with squares of lengths.
        change, copying: of each task, for the standard microbatch.
        limits: what each rank may hold.
    """

    both: Both
    place: Any
    linear: Any
    attention: Any
    change: Any
    copying: Any
    limits: Any


def put(places: Places, order: Any, tokens: Any, squares: Any) -> None:
    """Give every task what it takes where microbatch ``order[k]`` has place k."""
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
    """Whether ranks keep within their limits in this order of passes."""
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
    """So many rounds from ``order`` and ``passes``, which are overwritten with where it gets.

    Each move exchanges or moves microbatches, or stirs the passes with a little noise; what is not clearly longer is
    gone on from.

    Args:
        places: the tasks.
        work: what rounds write.
        tokens, squares: of each microbatch.
        order: of the microbatches.
        passes: their order; within the limits.
        length: of both, as scheduled before; :data:`NEVER` for the first time.
        rounds: of list scheduling, a few more where a move has begun.
        lookahead: of ranks, in passes.
        threshold: how much longer than before an order may be that is gone on from.
        seed: of everything random.
        best_order, best_passes: overwritten with the shortest it came by.

    Returns:
        The makespans of the shortest, and of where it got.
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
    """One climb on its way: where it is, how long that is, and the shortest it came by.

    Args:
        seed: its own.
        order, passes, length: of the microbatches, of the passes, and the makespan.
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
    """The shortest order of microbatches and of passes found in so many rounds.

    A climb starts from each order of microbatches, all with the passes as they are numbered. Half of them go on, and
    half of these again, each time with as many rounds together, until one is left.

    Args:
        run: :func:`climb`, or its machine code.
        places: the tasks.
        work: what rounds write, as ``run`` takes it.
        loads: of the microbatches.
        orders: of the microbatches to begin with; those with which the passes do not fit under the limits are left out.
        rounds, lookahead, threshold: see :func:`climb`.

    Returns:
        None where none of ``orders`` fits.
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
