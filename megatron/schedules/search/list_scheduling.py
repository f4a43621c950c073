"""List scheduling: an order taken through time, each rank running ahead where it would idle; the planner's inner loop.

Plain loops over flat sequences, and nothing that Python and numba would take differently: the named schedules run this
function as it is, the adaptive search and large plans run it compiled, on arrays, and both make the same choices.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from heapq import heappop, heappush, heapreplace
from operator import itemgetter
from typing import Any, NamedTuple

# Times closer than this are one time. Plans are made with passes that take about 1, see polish.
EPSILON = 1e-9
# Later than any event: the times of all tasks together are less, see :func:`.tasks.tasks_of`.
NEVER = 1e300
# Of the noise's states, and more than any order has tasks. Products of two such numbers are exact in machine code.
_LARGE = 2**31
# The first of a heap; compiled, all four are those of :mod:`.event_queue`.
first_of = itemgetter(0)


class Instance(NamedTuple):
    """The tasks that are ordered and what binds them, in flat sequences: lists, or arrays for the compiled function.

    Args:
        first: tasks of rank r stand in an order from place ``first[r]`` up to ``first[r + 1]``.
        rank, duration, change, filler, steady, channel, copying, opens: of each task, see :class:`.tasks.Tasks`.
        waits: for each task how many others it waits for.
        after, follower, delay: the tasks that wait for task t, and how long after its end they may start, stand from
            ``after[t]`` up to ``after[t + 1]``.
        returns: for each task the next one that gives back what it took, see :class:`.tasks.Tasks`; -1 for most.
        returned: whether the task is another's in ``returns``.
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
    returned: Sequence[bool]


class Space(NamedTuple):
    """What list scheduling writes while it runs: lists, or arrays for the compiled function; see :func:`space_for`.

    Args:
        missing: how many others each task still waits for.
        ready: when each task could start, as far as is known.
        following, preceding: each rank's remaining order as a ring, through its tasks and a node of the rank's own.
        events: a heap of times at which a rank may take its next pass, and these ranks; before and after, (NEVER, -1).
    """

    missing: MutableSequence[int]
    ready: MutableSequence[float]
    following: MutableSequence[int]
    preceding: MutableSequence[int]
    events: Any


def space_for(tasks: Instance) -> Space:
    """Space for rounds of ``tasks`` in lists."""
    size, ranks = len(tasks.rank), len(tasks.first) - 1
    nodes = [0] * (size + ranks)
    return Space([0] * size, [0.0] * size, nodes, nodes[:], [(NEVER, -1)])


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


def sound(policy: Policy) -> Policy:
    """``policy`` in numbers that are the same in Python and in machine code, which has 64 bits for each.

    Raises:
        ValueError: where some task would never be taken.
    """
    if not (policy.lookahead >= 1 and 0 <= policy.patience <= 1):
        raise ValueError(f"no order follows from {policy}")
    return policy._replace(lookahead=min(policy.lookahead, _LARGE), seed=policy.seed % _LARGE)


def list_schedule(
    tasks: Instance,
    order: Sequence[int],
    limits: Sequence[float],
    policy: Policy,
    space: Space,
    scheduled: MutableSequence[int],
) -> float:
    """Write the order in which the tasks run into ``scheduled``; returns the makespan, NEVER where some never run.

    A free rank takes the first task of its remaining order that is ready and after which that order, followed as it
    stands, still keeps within the rank's limit.

    Args:
        tasks: what is ordered.
        order: task numbers, rank by rank; within ``limits``. It may be ``scheduled`` itself.
        limits: the most each rank may hold.
        policy: how ranks choose, as :func:`sound` has it.
        space: overwritten.
        scheduled: as long as ``order``, overwritten.
    """
    first, rank_of, duration, change, filler, steady, channel, copying, opens, waits = tasks[:10]
    after, follower, delay, returns, returned = tasks[10:]
    lookahead, defer_fillers, patience, ends_only, noise, seed, just_in_time = policy
    missing, ready, following, preceding, events = space
    ranks, size = len(first) - 1, len(order)
    for rank in range(ranks):
        left = size + rank
        for place in range(first[rank], first[rank + 1]):
            task = order[place]
            missing[task], ready[task] = waits[task], 0.0
            following[left], preceding[task] = task, left
            left = task
        following[left], preceding[size + rank] = size + rank, left
        heappush(events, (0.0, rank))
    held, free_at, channel_free = [0.0] * ranks, [0.0] * ranks, [0.0] * (2 * ranks)
    place_of = [first[rank] for rank in range(ranks)]
    state = seed
    makespan = 0.0
    while True:
        now, rank = first_of(events)
        if rank < 0:
            for each in range(ranks):
                task = following[size + each]
                while task < size:  # what never ran, so that every task is in the order
                    scheduled[place_of[each]] = task
                    place_of[each] += 1
                    task = following[task]
                    makespan = NEVER
            return makespan
        if now + EPSILON < free_at[rank]:
            heappop(events)
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
        end_node = size + rank
        head = following[end_node]
        task, looked = head, 0
        while task != end_node and looked < lookahead:
            takes = change[task]
            if missing[task] == 0:
                if ready[task] > soon:
                    if ready[task] < awaited:
                        awaited = ready[task]
                else:
                    fits, last = takes <= 0 or highest + takes <= limit, task
                    saving = takes > 0 and returns[task] >= 0
                    if saving and just_in_time and task != head and missing[returns[task]] > 1:
                        fits = False
                    elif saving and not fits:
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
                heapreplace(events, (awaited, rank))
            else:
                heappop(events)
            continue
        end = now + duration[chosen]
        free_at[rank] = end
        heapreplace(events, (end, rank))
        if opens[chosen]:  # computing goes on; who waits for the copy waits for its end
            end = max(now, channel_free[channel[chosen]]) + copying[chosen]
            channel_free[channel[chosen]] = end
        if end > makespan:
            makespan = end
        held[rank] += change[chosen]
        task, last = chosen, end_node
        while True:
            left, right = preceding[task], following[task]
            following[left], preceding[right] = right, left
            if task != chosen:  # what gives back goes to the head
                right = following[last]
                following[last], preceding[task] = task, last
                following[task], preceding[right] = right, task
                last = task
            if task == until:
                break
            task = returns[task]
        scheduled[place_of[rank]] = chosen
        place_of[rank] += 1
        for link in range(after[chosen], after[chosen + 1]):
            task = follower[link]
            missing[task] -= 1
            if end + delay[link] > ready[task]:
                ready[task] = end + delay[link]
            other = rank_of[task]
            if missing[task] > 0:
                if missing[task] > 1 or not returned[task]:
                    continue
                wake = now  # what it waits for may go out of turn now
            else:
                if channel[task] >= 0 and not opens[task]:  # a copy that is under way before its place
                    ready[task] = max(ready[task], channel_free[channel[task]]) + copying[task]
                    channel_free[channel[task]] = ready[task]
                if other == rank:
                    continue
                wake = ready[task]
            # A busy rank looks again when it is free in any case. With noise one look more is another draw.
            if noise > 0 or free_at[other] <= now or free_at[other] < wake:
                heappush(events, (max(wake, free_at[other]), other))
