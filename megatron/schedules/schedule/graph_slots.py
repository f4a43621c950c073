"""Slots for CUDA graphs: which microbatches of a rank replay the same graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.schedules.schedule.kinds import SPLIT, WHOLES, Kind, Pass

WITH_GRAPHS = frozenset((*SPLIT, *WHOLES.values()))
"""Kinds of pass that run through layers, whose graphs they replay."""

_Key = tuple[int, int]
"""Stage and microbatch."""


class GraphSlot(NamedTuple):
    """Slot of one stage and microbatch.

    Args:
        number: number of the slot on its rank, from 0. A slot has its own memory, and one microbatch at a time.
        captured: microbatch whose graphs are replayed: the first of this stage in the slot with the same passes.
    """

    number: int
    captured: int


def graph_slots(row: Sequence[Pass]) -> dict[_Key, GraphSlot]:
    """Colours the intervals in which the microbatches of each stage are in flight, with as few slots as possible.

    An interval is from an F to the last of I, W and B of the same stage and microbatch. As many slots are needed as
    intervals overlap. A free slot that already has graphs of the stage is preferred, so that few are captured.

    Args:
        row: passes of a rank, in order.

    Returns:
        The slot of each (stage, microbatch).
    """
    last = {(stage, microbatch): at for at, (stage, kind, microbatch) in enumerate(row) if kind in WITH_GRAPHS}
    split = {(stage, microbatch) for stage, kind, microbatch in row if kind is Kind.W}
    slots: dict[_Key, GraphSlot] = {}
    free: list[int] = []
    captured: list[dict[tuple[int, bool], int]] = []  # by slot: the microbatch of each stage, split or not
    for at, (stage, kind, microbatch) in enumerate(row):
        key = stage, microbatch
        if kind is Kind.F:
            form = stage, key in split
            number = next((each for each in free if form in captured[each]), free[0] if free else len(captured))
            if number in free:
                free.remove(number)
            else:
                captured.append({})
            slots[key] = GraphSlot(number, captured[number].setdefault(form, microbatch))
        elif key in slots and last[key] == at:
            free.append(slots[key].number)
    return slots


def slot_counts(order: Iterable[Sequence[Pass]]) -> list[int]:
    """Returns the number of slots of each rank."""
    return [len({slot.number for slot in graph_slots(row).values()}) for row in order]


def captured_passes(row: Iterable[Pass], slots: dict[_Key, GraphSlot]) -> list[list[Pass]]:
    """Returns the passes of each slot whose graphs are captured, in order: replays in a slot come in the same order."""
    passes: dict[int, list[Pass]] = {}
    for work in row:
        slot = slots.get((work.stage, work.microbatch))
        if slot is not None and slot.captured == work.microbatch and work.kind in WITH_GRAPHS:
            passes.setdefault(slot.number, []).append(work)
    return list(passes.values())
