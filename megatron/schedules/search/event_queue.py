"""Heap of events in arrays, for compiled code. It is much faster there than :mod:`heapq` on lists of pairs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Queue(NamedTuple):
    """Events in heap order.

    Args:
        times: time of each event.
        ranks: rank of each event.
        count: number of events, an array of one number.
    """

    times: Any
    ranks: Any
    count: Any


def first_of(events: Queue) -> tuple[float, int]:
    """Returns the earliest event; at equal times the one with the lowest rank."""
    return events.times[0], events.ranks[0]


def heappush(events: Queue, event: tuple[float, int]) -> None:
    """Adds ``event``."""
    times, ranks = events.times, events.ranks
    time, rank = event
    at = events.count[0]
    events.count[0] = at + 1
    while at > 0:
        above = (at - 1) // 2
        if times[above] < time or (times[above] == time and ranks[above] <= rank):
            break
        times[at], ranks[at] = times[above], ranks[above]
        at = above
    times[at], ranks[at] = time, rank


def heapreplace(events: Queue, event: tuple[float, int]) -> None:
    """Replaces the first event with ``event``."""
    times, ranks = events.times, events.ranks
    time, rank = event
    at, below, count = 0, 1, events.count[0]
    while below < count:
        other = below + 1
        if other < count and (
            times[other] < times[below] or (times[other] == times[below] and ranks[other] < ranks[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and rank <= ranks[below]):
            break
        times[at], ranks[at] = times[below], ranks[below]
        at, below = below, 2 * below + 1
    times[at], ranks[at] = time, rank


def heappop(events: Queue) -> None:
    """Removes the first event."""
    events.count[0] -= 1
    heapreplace(events, (events.times[events.count[0]], events.ranks[events.count[0]]))
