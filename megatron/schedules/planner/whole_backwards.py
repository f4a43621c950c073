"""Reference schedules of a verification: a schedule whose backwards are whole (B) in place of split (I and W)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.schedules.schedule.kinds import COUNTS_AS, KINDS, Kind, Pass, sources
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.validation import validate


def references(schedule: Schedule) -> tuple[Schedule, ...]:
    """Returns the schedules that give the same gradients to the bit, with each I and W joined into a B.

    Placement, layers, and all other passes are those of ``schedule``; one that splits nothing is its own reference.
    Each B is where I was, so a reference holds no more activations.

    Gradients of linears are summed in the order of W's, all others in that of I's. Almost every schedule has the same
    order of microbatches in both, and one reference. Else there are two, and a parameter's gradient equals that of one:
    the second has each B where W was, and holds more activations.
    """
    if not schedule.splits:
        return (schedule,)
    schedules = [_joined(schedule, Kind.I, Kind.W)]
    if any(_turns(row, Kind.I) != _turns(row, Kind.W) for row in schedule.order):
        schedules.append(_mended(_joined(schedule, Kind.W, Kind.I)))
    for reference in schedules:
        validate(reference)
    return tuple(schedules)


def _joined(schedule: Schedule, kept: Kind, dropped: Kind) -> Schedule:
    rows = (
        tuple(work._replace(kind=Kind.B) if work.kind is kept else work for work in row if work.kind is not dropped)
        for row in schedule.order
    )
    return replace(schedule, order=tuple(rows))


def _turns(row: Sequence[Pass], part: Kind) -> dict[int, list[int]]:
    """Microbatches of each stage in the order of its ``part``, I or W."""
    turns: dict[int, list[int]] = {}
    for stage, kind, m in row:
        if kind in (part, Kind.B):
            turns.setdefault(stage, []).append(m)
    return turns


def _mended(schedule: Schedule) -> Schedule:
    """Returns an order that ends: where ranks would wait for each other, the nearest pass that can run goes ahead.

    The forwards of a rank keep their order, and so do the passes of one kind on a stage.
    """
    left, order = [list(row) for row in schedule.order], [list[Pass]() for _ in schedule.order]
    there, done = {work for row in left for work in row}, set[Pass]()

    def can_run(work: Pass) -> bool:
        for stage, kinds in sources(work.kind, work.stage, schedule.placement, schedule.kinds):
            needed = [Pass(stage, kind, work.microbatch) for kind in kinds]
            optional = KINDS[kinds[0]].optional and there.isdisjoint(needed)
            if not optional and done.isdisjoint(needed):
                return False
        return True

    def candidates() -> Iterator[tuple[int, int]]:
        for rank, row in enumerate(left):
            lines = set[object]()
            for index, work in enumerate(row):
                line = work.kind if work.kind is Kind.F else (work.stage, COUNTS_AS[work.kind])
                if line not in lines and can_run(work):
                    yield index, rank
                lines.add(line)

    while any(left):
        index, rank = min(candidates())
        work = left[rank].pop(index)
        order[rank].append(work)
        done.add(work)
    return replace(schedule, order=tuple(map(tuple, order)))
