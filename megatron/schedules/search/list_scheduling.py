"""List scheduling: an order taken through time, each rank running ahead where it would idle; the planner's inner loop.

Plain loops over flat sequences, and nothing that Python and numba would take differently: the named schedules run this
function as it is, the adaptive search and large plans run it compiled, on arrays, and both make the same choices.
"""

from __future__ import annotations

import heapq
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

# Times closer than this are one time. Plans are made with passes that take about 1, see polish.
EPSILON = 1e-9
NEVER = 1e300


class Instance(NamedTuple):
    """The tasks that are ordered and what binds them, in flat sequences: lists, or arrays for the compiled function.

    Args:
        first: tasks of rank r stand in an order from place ``first[r]`` up to ``first[r + 1]``.
        rank, duration, change, filler, steady, channel, copying, opens: of each task, see :class:`.tasks.Tasks`.
        waits: for each task how many others it waits for.
        after, follower, delay: the tasks that wait for task t, and how long after its end they may start, stand from
            ``after[t]`` up to ``after[t + 1]``.
        returns: for each task the next one that gives back what it took, see :class:`.tasks.Tasks`; -1 for most.
    """

    first: Sequence[int]
    rank: Sequence[int]
    duration: Sequence[float]
    change: Sequence[float]
    filler: Sequence[bool]
    steady: Sequence[bool]
    channel: Sequence[int]
    copying: Sequence[float]
    opens: Sequence[bool]
    waits: Sequence[int]
    after: Sequence[int]
    follower: Sequence[int]
    delay: Sequence[float]
    returns: Sequence[int]


class Policy(NamedTuple):
    """How a free rank chooses.

    Args:
        lookahead: how many of its remaining passes it looks at.
        defer_fillers: take a ready pass that others wait for before a ready filler that stands earlier, memory
            allowing.
        patience: idle rather than start a pass that would delay an earlier one, known to become ready, by more than
            this share of the pass's own duration.
        ends_only: keep the base order of each rank but for its cool-down, from its last forward on.
        noise: the probability of passing over a pass that could be taken, for a search that wants to see other orders.
        seed: of the noise; a plan must come out the same everywhere.
        just_in_time: take a task of :attr:`Instance.returns` out of turn only when the task that it names waits for
            nothing else: recompute (R) then holds no memory while the gradient is still several passes away.
    """

    lookahead: int
    defer_fillers: bool = False
    patience: float = 1.0
    ends_only: bool = False
    noise: float = 0.0
    seed: int = 0
    just_in_time: bool = False


def list_schedule(
    tasks: Instance,
    order: Sequence[int],
    limits: Sequence[float],
    policy: Policy,
    missing: MutableSequence[int],
    ready: MutableSequence[float],
    scheduled: MutableSequence[int],
) -> float:
    """Write the order in which the tasks run into ``scheduled``; returns the makespan.

    A free rank takes the first task of its remaining order that is ready and after which that order, followed as it
    stands, still keeps within the rank's limit.

    Args:
        tasks: what is ordered.
        order: task numbers, rank by rank; within ``limits``.
        limits: the most each rank may hold.
        policy: how ranks choose.
        missing: a copy of ``tasks.waits``; used up.
        ready: zero for each task; holds in the end when each could have started.
        scheduled: as long as ``order``, overwritten.
    """
    first, rank_of, duration, change, filler, steady, channel, copying, opens, _, after, follower, delay, returns = (
        tasks
    )
    lookahead, defer_fillers, patience, ends_only, noise, seed, just_in_time = policy
    ranks, size = len(first) - 1, len(order)
    following, preceding, head = [-1] * size, [-1] * size, [-1] * ranks
    returned = [False] * size
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
            if returns[task] >= 0:
                returned[returns[task]] = True
    held, free_at, channel_free = [0.0] * ranks, [0.0] * ranks, [0.0] * (2 * ranks)
    place_of = [first[rank] for rank in range(ranks)]
    events = [(0.0, rank) for rank in range(ranks)]
    state = seed % 2147483648
    makespan = 0.0
    while len(events) > 0:
        now, rank = heapq.heappop(events)
        if now + EPSILON < free_at[rank]:
            continue
        # A task may overtake those before it where they could still follow, as they stand, within the limit: what it
        # takes is there throughout. So what remains is a feasible order after every choice, and no choice can lead to
        # a deadlock, whatever the policy: there is always the first task to come back to. ``level`` is what the rank
        # would hold after the tasks looked at so far, ``highest`` the most it would have held until then.
        # Where it does not fit for that long, it may still overtake together with the tasks that give back what it
        # takes, if those wait for nothing else: they move to the head of the order, right behind it. Only what they
        # leave is then there throughout.
        limit, level, soon = limits[rank] + EPSILON, held[rank], now + EPSILON
        highest, awaited, spare, chosen, until, spare_until = level, NEVER, -1, -1, -1, -1
        task, looked = head[rank], 0
        while task >= 0 and looked < lookahead:
            takes = change[task]
            if missing[task] == 0:
                if ready[task] > soon:
                    if ready[task] < awaited:
                        awaited = ready[task]
                else:
                    fits, last = takes <= 0 or highest + takes <= limit, task
                    relieving = takes > 0 and returns[task] >= 0
                    if relieving and just_in_time and task != head[rank] and missing[returns[task]] > 1:
                        fits = False
                    elif relieving and not fits:
                        net, least, other = takes, takes, returns[task]
                        while held[rank] + net <= limit and other >= 0 and missing[other] == 1:
                            net += change[other]
                            if net < least and held[rank] + net <= limit:
                                least, last = net, other
                            other = returns[other]
                        fits = last != task and (least <= 0 or highest + least <= limit)
                    if fits:
                        passed_over = False
                        if noise > 0:
                            state = (state * 1103515245 + 12345) % 2147483648
                            passed_over = state < noise * 2147483648.0
                        if passed_over or (filler[task] and defer_fillers):
                            if spare < 0:
                                spare, spare_until = task, last
                        elif soon + (1 - patience) * duration[task] <= awaited + 2 * EPSILON:
                            chosen, until = task, last
                            break
            if ends_only and steady[task]:
                break
            level += takes
            if level > highest:
                highest = level
            task = following[task]
            looked += 1
        if chosen < 0 and spare >= 0 and soon + (1 - patience) * duration[spare] <= awaited + 2 * EPSILON:
            chosen, until = spare, spare_until
        if chosen < 0:
            if awaited < NEVER:
                heapq.heappush(events, (awaited, rank))
            continue
        end = now + duration[chosen]
        free_at[rank] = end
        heapq.heappush(events, (end, rank))
        if opens[chosen]:  # computing goes on; who waits for the copy waits for its end
            end = max(now, channel_free[channel[chosen]]) + copying[chosen]
            channel_free[channel[chosen]] = end
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
        other, before = chosen, -1
        while other != until:  # what gives back goes to the head
            other = returns[other]
            left, right = preceding[other], following[other]
            if left < 0:
                head[rank] = right
            else:
                following[left] = right
            if right >= 0:
                preceding[right] = left
            right = head[rank] if before < 0 else following[before]
            preceding[other], following[other] = before, right
            if before < 0:
                head[rank] = other
            else:
                following[before] = other
            if right >= 0:
                preceding[right] = other
            before = other
        scheduled[place_of[rank]] = chosen
        place_of[rank] += 1
        for link in range(after[chosen], after[chosen + 1]):
            task = follower[link]
            missing[task] -= 1
            if end + delay[link] > ready[task]:
                ready[task] = end + delay[link]
            if missing[task] > 0:
                if returned[task] and missing[task] == 1:  # what it waits for may go out of turn now
                    heapq.heappush(events, (max(now, free_at[rank_of[task]]), rank_of[task]))
                continue
            if channel[task] >= 0 and not opens[task]:  # a copy that is under way before its place
                ready[task] = max(ready[task], channel_free[channel[task]]) + copying[task]
                channel_free[channel[task]] = ready[task]
            other = rank_of[task]
            if other != rank:
                heapq.heappush(events, (max(ready[task], free_at[other]), other))
    return makespan
