"""A rank's time as lanes, in each of which one thing runs at a time: its computing, and below it its copy channels."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.simulator import Timeline

Lane = Sequence[tuple[Pass, float, float]]
"""What runs in it, from when until when, ascending; nothing that takes no time."""

_COPYING = (Resource.TO_HOST, Resource.FROM_HOST)
_KINDS = {each: [kind for kind, row in KINDS.items() if row.resource is each] for each in _COPYING}


def lanes(timeline: Timeline, rank: int) -> list[Lane]:
    """The lanes of ``rank``, that of computing first; there are as many on every rank."""
    order, copies = timeline.schedule.order[rank], timeline.copies[rank] if timeline.copies else ()
    computing = zip(order, timeline.start[rank], timeline.end[rank], strict=True)
    channels = [[each for each in copies if each.work.kind in kinds] for kinds in copied(timeline)]
    return [[each for each in lane if each[2] > each[1]] for lane in (computing, *channels)]


def copied(timeline: Timeline) -> list[list[Kind]]:
    """What each of a rank's lanes of copies is for: one a direction where both may run at once."""
    if not any(timeline.copies):
        return []
    return [[kind for kinds in _KINDS.values() for kind in kinds]] if timeline.costs.one_way else list(_KINDS.values())
