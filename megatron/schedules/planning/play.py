"""Playing an order through in time, each rank running ahead where it would idle: the planner's inner loop.

Plain loops over flat sequences, and nothing that Python and numba would take differently: the named schedules run this
function as it is, the adaptive search runs it compiled, on arrays, and both make the same choices.
"""

from __future__ import annotations

import heapq
from collections.abc import MutableSequence, Sequence

# Times closer than this are one time. Plans are made with passes that take about 1, see polish.
EPSILON = 1e-9
NEVER = 1e300


def play(
    order: Sequence[int],
    first: Sequence[int],
    rank_of: Sequence[int],
    duration: Sequence[float],
    change: Sequence[float],
    weight: Sequence[bool],
    fixed: Sequence[bool],
    missing: MutableSequence[int],
    ready: MutableSequence[float],
    after: Sequence[int],
    follower: Sequence[int],
    delay: Sequence[float],
    limits: Sequence[float],
    window: int,
    defer_weights: bool,
    patience: float,
    noise: float,
    seed: int,
    played: MutableSequence[int],
) -> float:
    """Write the order in which the tasks run into ``played``; returns the makespan.

    A free rank takes the first task of its remaining order that is ready and after which that order, followed as it
    stands, still keeps within the rank's limit.

    Args:
        order: task numbers, rank by rank, those of rank r from ``first[r]`` up to ``first[r + 1]``.
        rank_of, duration, change, weight, fixed: of each task, see :class:`.tasks.Tasks`; a fixed task is not
            overtaken.
        missing: for each task how many others it waits for; used up.
        ready: zero for each task; holds in the end when each could have started.
        after, follower, delay: the tasks that wait for task t, and how long after its end they may start, stand from
            ``after[t]`` up to ``after[t + 1]``.
        limits: the most each rank may hold.
        window, defer_weights, patience: see :class:`.reorder.Policy`.
        noise: the probability of passing over a task that could be taken, for a search that wants to see other orders.
        seed: of the noise; a plan must come out the same everywhere.
        played: as long as ``order``, overwritten.
    """
    ranks, size = len(first) - 1, len(order)
    following, preceding, head = [-1] * size, [-1] * size, [-1] * ranks
    for rank in range(ranks):
        left = -1
        for place in range(first[rank], first[rank + 1]):
            task = order[place]
            preceding[task] = left
            if left < 0:
                head[rank] = task
            else:
                following[left] = task
            left = task
    held, free_at = [0.0] * ranks, [0.0] * ranks
    place_of = [first[rank] for rank in range(ranks)]
    events = [(0.0, rank) for rank in range(ranks)]
    state = seed % 2147483648
    makespan = 0.0
    while len(events) > 0:
        now, rank = heapq.heappop(events)
        if now + EPSILON < free_at[rank]:
            continue
        limit, level, soon = limits[rank] + EPSILON, held[rank], now + EPSILON
        highest, awaited, spare, chosen = level, NEVER, -1, -1
        task, looked = head[rank], 0
        while task >= 0 and looked < window:
            takes = change[task]
            if missing[task] == 0:
                if ready[task] > soon:
                    if ready[task] < awaited:
                        awaited = ready[task]
                elif takes <= 0 or highest + takes <= limit:
                    passed_over = False
                    if noise > 0:
                        state = (state * 1103515245 + 12345) % 2147483648
                        passed_over = state < noise * 2147483648.0
                    if passed_over or (weight[task] and defer_weights):
                        if spare < 0:
                            spare = task
                    elif soon + (1 - patience) * duration[task] <= awaited + 2 * EPSILON:
                        chosen = task
                        break
            if fixed[task]:
                break
            level += takes
            if level > highest:
                highest = level
            task = following[task]
            looked += 1
        if chosen < 0 and spare >= 0 and soon + (1 - patience) * duration[spare] <= awaited + 2 * EPSILON:
            chosen = spare
        if chosen < 0:
            if awaited < NEVER:
                heapq.heappush(events, (awaited, rank))
            continue
        end = now + duration[chosen]
        free_at[rank] = end
        if end > makespan:
            makespan = end
        held[rank] += change[chosen]
        left, right = preceding[chosen], following[chosen]
        if left < 0:
            head[rank] = right
        else:
            following[left] = right
        if right >= 0:
            preceding[right] = left
        played[place_of[rank]] = chosen
        place_of[rank] += 1
        heapq.heappush(events, (end, rank))
        for link in range(after[chosen], after[chosen + 1]):
            task = follower[link]
            missing[task] -= 1
            if end + delay[link] > ready[task]:
                ready[task] = end + delay[link]
            other = rank_of[task]
            if missing[task] == 0 and other != rank:
                heapq.heappush(events, (max(ready[task], free_at[other]), other))
    return makespan
