"""List scheduling: assigns times to an order and runs later passes early on ranks that would idle.

It is the planner's inner loop. It uses plain loops over flat sequences, and no operation that differs between Python
and numba. Named schedules run it in Python. The adaptive search and large plans run it compiled, on arrays. Both make
the same choices.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from heapq import heappop, heappush, heapreplace
from operator import itemgetter
from typing import Any, NamedTuple

# Times closer than this are equal. Passes take about 1, see :mod:`.polish`.
EPSILON = 1e-9
# Later than any event: the sum of the times of all tasks is smaller, see :func:`.tasks.tasks_of`.
NEVER = 1e300
# Modulus of the random states of the noise; no order has as many tasks. Products of two such numbers are exact in
# 64-bit integers.
_LARGE = 2**31
# First element of a heap. Compiled code uses the four functions of :class:`.compiled.Queue` instead.
first_of = itemgetter(0)


# Values of :attr:`Instance.weights`.
NO_W, IS_W = -1, -2


class Instance(NamedTuple):
    """Tasks and their constraints in flat sequences: lists, or arrays for compiled code.

    Args:
        first: tasks of rank r have positions ``first[r]`` up to, but not including, ``first[r + 1]`` in an order.
        rank, duration, change, filler, steady, channel, copying, opens: per task, see :class:`.tasks.Tasks`.
        waits: number of tasks that each task waits for.
        after: index in ``follower`` and ``delay`` of the first task that waits for task t; they end before
            ``after[t + 1]``.
        follower: tasks that wait for another.
        delay: least time from the end of the other task to the start of each follower.
        returns: next task that frees what this task allocated, see :class:`.tasks.Tasks`; -1 for most.
        returned: true if the task is in ``returns`` of another one.
        message: time of each task that waits for messages of experts; empty with time running backwards, and if no
            task does.
        weights: for each I its W, :data:`IS_W` for a W, :data:`NO_W` for others.
        stage: stage of each task.
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
    message: Sequence[float]
    weights: Sequence[int]
    stage: Sequence[int]


class Space(NamedTuple):
    """Working memory of list scheduling: lists, or arrays for compiled code; see :func:`space_for`.

    Args:
        missing: number of tasks that each task still waits for.
        ready: earliest start of each task, as far as known.
        following, preceding: remaining order of each rank as a ring of its tasks and one node of its own.
        events: heap of the times at which a rank may start its next pass, with that rank. (NEVER, -1) is
            its only entry before and after a run.
        left: time that each task takes: its duration, or what is left of a W. The caller sets it before a run.
        due: W's of each rank that are due, in the order in which they became due, from ``first`` of the rank on. The
            last W of a stage is ``~task``: nothing of it runs behind messages.
        held: memory that each rank uses now.
        free_at: time at which each rank has run its passes so far.
        wakes: earliest event of each rank.
        channel_free: time at which each channel has run its copies so far.
        place_of: position of the next task of each rank.
        released: number of remaining tasks of each rank that wait for no other one.
        oldest, turn, newest: for each rank the first W in ``due``, the first of which something may still run behind a
            message, and the end.
    """

    missing: MutableSequence[int]
    ready: MutableSequence[float]
    following: MutableSequence[int]
    preceding: MutableSequence[int]
    events: Any
    left: MutableSequence[float]
    due: MutableSequence[int]
    held: MutableSequence[float]
    free_at: MutableSequence[float]
    wakes: MutableSequence[float]
    channel_free: MutableSequence[float]
    place_of: MutableSequence[int]
    released: MutableSequence[int]
    oldest: MutableSequence[int]
    turn: MutableSequence[int]
    newest: MutableSequence[int]


def space_for(tasks: Instance) -> Space:
    """Returns working memory in lists for rounds of ``tasks``."""
    size, ranks = len(tasks.rank), len(tasks.first) - 1
    nodes = [0] * (size + ranks)
    of_tasks: tuple[Any, ...] = (nodes, nodes[:], [(NEVER, -1)], list(tasks.duration), [0] * size)
    of_ranks: tuple[Any, ...] = (*([0.0] * (2 * ranks) for _ in range(4)), *([0] * ranks for _ in range(5)))
    return Space([0] * size, [0.0] * size, *of_tasks, *of_ranks)


class Policy(NamedTuple):
    """Rules by which a free rank chooses its next pass.

    Args:
        lookahead: number of its remaining passes that the rank considers.
        defer_fillers: prefer a ready pass that others wait for to an earlier ready filler, if memory allows.
        patience: stay idle rather than start a pass that would delay an earlier one by more than this share of the
            started pass's own duration. Only earlier passes whose ready time is known count.
        ends_only: keep the base order of each rank except in its cool-down, from its last forward on.
        noise: probability of skipping a pass that could start, so that a search sees other orders.
        seed: random seed of the noise, so that a plan is the same everywhere.
        just_in_time: run a task of :attr:`Instance.returns` early only if the task that it names waits for nothing
            else. Recompute (R) then allocates no memory while the gradient is still several passes away.
    """

    lookahead: int
    defer_fillers: bool = False
    patience: float = 1.0
    ends_only: bool = False
    noise: float = 0.0
    seed: int = 0
    just_in_time: bool = False


def sound(policy: Policy) -> Policy:
    """Returns ``policy`` with numbers that fit 64 bits, so that Python and compiled code agree.

    Raises:
        ValueError: if some task would never run.
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
    """Writes the order of the tasks into ``scheduled``. Returns the makespan, or NEVER if some tasks never run.

    A free rank starts the first task of its remaining order that is ready and after which the rest of that order still
    keeps within the rank's memory limit.

    Weight gradients that are due run behind messages of experts, as :mod:`.hidden_messages` says. Then a rank runs its
    W's in the order in which they became due: the first W of the remaining order stands for the oldest of them. A W
    that has nothing left runs at once, which frees its memory.

    Args:
        tasks: tasks to order.
        order: task numbers, rank by rank, within ``limits``. May be ``scheduled`` itself.
        limits: memory limit of each rank, in microbatches.
        policy: rules of choice, as returned by :func:`sound`.
        space: working memory, overwritten.
        scheduled: result, as long as ``order``; overwritten.
    """
    first, rank_of, _, change, filler, steady, channel, copying, opens, waits = tasks[:10]
    after, follower, delay, returns, returned, message, weights, stage = tasks[10:]
    lookahead, defer_fillers, patience, ends_only, noise, seed, just_in_time = policy
    missing, ready, following, preceding, events, left, due = space[:7]
    held, free_at, wakes, channel_free, place_of, released, oldest, turn, newest = space[7:]
    ranks, size = len(first) - 1, len(order)
    hides, noisy = len(message) > 0, noise > 0
    stages = 0
    if hides:
        for task in range(size):
            stages = max(stages, stage[task] + 1)
    missing[:] = waits
    inputs = [0] * stages  # remaining I's of each stage
    if hides:
        for task in range(size):
            inputs[stage[task]] += weights[task] >= 0
    for rank in range(ranks):
        oldest[rank] = turn[rank] = newest[rank] = place_of[rank] = first[rank]
        held[rank] = free_at[rank] = wakes[rank] = channel_free[rank] = channel_free[ranks + rank] = 0.0
        before, open_ones = size + rank, 0
        for task in order[first[rank] : first[rank + 1]]:
            ready[task] = 0.0
            if waits[task] == 0:
                open_ones += 1
            following[before], preceding[task] = task, before
            before = task
        following[before], preceding[size + rank] = size + rank, before
        released[rank] = size if hides else open_ones
        heappush(events, (0.0, rank))
    state = seed
    makespan = 0.0
    while True:
        now, rank = first_of(events)
        if rank < 0:
            for stuck in range(ranks):
                task = following[size + stuck]
                while task < size:  # tasks that never ran, so that the order is complete
                    scheduled[place_of[stuck]] = task
                    place_of[stuck] += 1
                    task = following[task]
                    makespan = NEVER
            return makespan
        soon = now + EPSILON
        if soon < free_at[rank]:
            heappop(events)
            continue
        # A task may run before earlier ones if these can still follow in their order within the limit, while the memory
        # that it allocates stays allocated. So the remaining order is feasible after every choice. No policy can cause
        # a deadlock, because the first remaining task can always run. ``level`` is the memory that the rank would use
        # after the tasks considered so far, ``highest`` its peak until then.
        # If the memory does not fit for that long, the task may still run early together with the tasks that free what
        # it allocates, if those wait for nothing else. They move to the head of the order, directly after it. Only the
        # memory that they do not free then stays allocated.
        used, open_ones, chosen, end_node = held[rank], released[rank], -1, size + rank
        head = following[end_node]
        if hides:
            slot = old = -1  # the first W of the remaining order, and the oldest due one, which runs in its place
            if oldest[rank] < newest[rank]:
                old = max(due[oldest[rank]], ~due[oldest[rank]])
                slot = head
                while weights[slot] != IS_W:
                    slot = following[slot]
                if left[old] <= EPSILON and missing[old] == 0:
                    chosen = until = old
        elif open_ones > 0 and missing[head] == 0 and ready[head] <= soon and not noisy:  # most choices need no more
            fits = change[head] <= 0.0 or used + change[head] <= limits[rank] + EPSILON
            if fits and not (defer_fillers and filler[head]):
                chosen = until = head
        if chosen < 0:
            level, highest, limit = used, used, limits[rank] + EPSILON
            task, looked, unseen, awaited, spare = head, 0, open_ones, NEVER, -1
            while unseen > 0 and looked < lookahead and task != end_node:
                runs = task
                if hides and weights[task] == IS_W:
                    runs = old if task == slot else -1
                if missing[runs] == 0 and runs >= 0:
                    unseen -= 1
                    if ready[runs] > soon:
                        if ready[runs] < awaited:
                            awaited = ready[runs]
                    else:
                        takes, last = change[runs], runs
                        fits = takes <= 0.0 or highest + takes <= limit
                        saving = takes > 0.0 and returns[runs] >= 0
                        if saving and just_in_time and runs != head and missing[returns[runs]] > 1:
                            fits = False
                        elif saving and not fits:
                            net, least, other = takes, takes, returns[runs]
                            while used + net <= limit and other >= 0 and missing[other] == 1:
                                net += change[other]
                                if net < least and used + net <= limit:
                                    least, last = net, other
                                other = returns[other]
                            fits = last != runs and (least <= 0 or highest + least <= limit)
                        if fits:
                            passed_over = False
                            if noisy:
                                state = (state * 1103515245 + 12345) % 2147483648
                                passed_over = state < noise * 2147483648.0
                            if passed_over or (filler[runs] and defer_fillers):
                                if spare < 0:
                                    spare, spare_until = runs, last
                            elif soon + (1 - patience) * left[runs] <= awaited + 2 * EPSILON:
                                chosen, until = runs, last
                                break
                if ends_only and steady[task]:
                    break
                level += change[task]
                if level > highest:
                    highest = level
                task = following[task]
                looked += 1
            if chosen < 0 and spare >= 0 and soon + (1 - patience) * left[spare] <= awaited + 2 * EPSILON:
                chosen, until = spare, spare_until
            if chosen < 0:
                wakes[rank] = awaited
                if awaited < NEVER:
                    heapreplace(events, (awaited, rank))
                else:
                    heappop(events)
                continue
        released[rank] = open_ones - 1
        end = now + left[chosen]
        free_at[rank] = wakes[rank] = end
        heapreplace(events, (end, rank))
        if opens[chosen]:  # computing continues; passes that need the copy wait for its end
            end = max(now, channel_free[channel[chosen]]) + copying[chosen]
            channel_free[channel[chosen]] = end
        if end > makespan:
            makespan = end
        held[rank] = used + change[chosen]
        if hides:
            if weights[chosen] == IS_W:
                oldest[rank] += 1
                turn[rank] = max(turn[rank], oldest[rank])
                if slot != chosen and abs(change[slot] - change[chosen]) <= EPSILON:  # take each other's place
                    before, right = preceding[slot], following[slot]
                    following[before], preceding[right] = right, before
                    right = following[chosen]
                    following[chosen], preceding[slot] = slot, chosen
                    following[slot], preceding[right] = right, slot
            travels = message[chosen]
            while travels > 0 and turn[rank] < newest[rank] and due[turn[rank]] >= 0:
                task = due[turn[rank]]
                behind = min(travels, left[task])
                left[task] -= behind
                travels -= behind
                if left[task] == 0:
                    turn[rank] += 1
            task = weights[chosen]
            if task >= 0:
                inputs[stage[task]] -= 1
                due[newest[rank]] = task if inputs[stage[task]] > 0 else ~task
                newest[rank] += 1
        before, right = preceding[chosen], following[chosen]
        following[before], preceding[right] = right, before
        task, last = chosen, end_node
        while task != until:  # tasks that free memory move to the head
            task = returns[task]
            before, right = preceding[task], following[task]
            following[before], preceding[right] = right, before
            right = following[last]
            following[last], preceding[task] = task, last
            following[task], preceding[right] = right, task
            last = task
        place = place_of[rank]
        scheduled[place], place_of[rank] = chosen, place + 1
        for link in range(after[chosen], after[chosen + 1]):
            task, arrival = follower[link], end + delay[link]
            if arrival > ready[task]:
                ready[task] = arrival
            awaits, other = missing[task] - 1, rank_of[task]
            missing[task] = awaits
            if awaits > 0:
                if awaits > 1 or not returned[task]:
                    continue
                wake = now  # the task that it waits for may now run early
            else:
                released[other] += 1
                if channel[task] >= 0 and not opens[task]:  # a copy that runs before its position
                    ready[task] = max(ready[task], channel_free[channel[task]]) + copying[task]
                    channel_free[channel[task]] = ready[task]
                if other == rank:
                    continue
                wake = ready[task]
            # A rank that chooses before that sees the task anyway. With noise, one more choice draws one more random
            # number.
            if wake < free_at[other]:
                wake = free_at[other]
            if noisy or wake < wakes[other]:
                wakes[other] = min(wake, wakes[other])
                heappush(events, (wake, other))


def set_left(
    tasks: Instance, order: Sequence[int], hides: bool, left: MutableSequence[float], due: MutableSequence[int]
) -> None:
    """Sets the time that each task takes.

    Args:
        tasks: the tasks, with time running forward.
        order: task numbers, rank by rank.
        hides: whether to take from each W what runs behind messages in ``order``, as :func:`.hidden_messages.hide`
            does if no backward is whole.
        left: result, by task; overwritten.
        due: working memory, by task; overwritten.
    """
    first, duration, message, weights, stage = tasks.first, tasks.duration, tasks.message, tasks.weights, tasks.stage
    stages = 0
    left[:] = duration
    if not hides or len(message) == 0:
        return
    for task in range(len(duration)):
        due[task] = 0
        stages = max(stages, stage[task] + 1)
    last = [-1] * stages
    for place in range(len(order)):
        if weights[order[place]] == IS_W:
            last[stage[order[place]]] = order[place]
    for rank in range(len(first) - 1):
        turn = first[rank]  # place of the next W of which something is left
        for place in range(first[rank], first[rank + 1]):
            task = order[place]
            travels = message[task]
            while travels > 0 and turn < first[rank + 1]:
                other = order[turn]
                if weights[other] == IS_W:
                    if due[other] == 0 or other == last[stage[other]]:
                        break
                    behind = min(travels, left[other])
                    left[other] -= behind
                    travels -= behind
                    if left[other] > 0:
                        break
                turn += 1
            if weights[task] >= 0:
                due[weights[task]] = 1
            turn = max(turn, place + 1)
