"""Slots for CUDA graphs: as many as microbatches are in flight, and none that two of them need at once."""

from __future__ import annotations

import pytest

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.graph_slots import WITH_GRAPHS, captured_passes, graph_slots
from megatron.schedules.schedule.kinds import Kind, Pass

SIZES = [
    ("1f1b", 4, 3),
    ("1f1b", 8, 64),
    ("interleaved-1f1b", 4, 32),
    ("zb-1p", 4, 32),
    ("v-min", 6, 17),
    ("v-half", 4, 24),
    ("v-zb", 4, 9),
]


def rows(schedule: str, ranks: int, microbatches: int) -> list[list[Pass]]:
    """Rows of a job with graphs, which splits all backwards or none."""
    order = plan(Request(schedule, ranks, microbatches, alike=True)).order
    return [[work for work in row if work.kind in WITH_GRAPHS] for row in order]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), SIZES)
def test_no_two_microbatches_in_flight_share_a_slot(schedule: str, ranks: int, microbatches: int) -> None:
    for row in rows(schedule, ranks, microbatches):
        slots, in_slot, most = graph_slots(row), dict[int, tuple[int, int]](), 0
        left = {(stage, m): sum(each[::2] == (stage, m) for each in row) for stage, _, m in row}
        for stage, _, m in row:
            number = slots[stage, m].number
            assert in_slot.setdefault(number, (stage, m)) == (stage, m)
            most = max(most, len(in_slot))
            left[stage, m] -= 1
            if not left[stage, m]:
                del in_slot[number]
        assert len({slot.number for slot in slots.values()}) == most, "as many as are in flight at once"


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), SIZES)
def test_replays_of_a_slot_come_in_the_order_of_its_captures(schedule: str, ranks: int, microbatches: int) -> None:
    for row in rows(schedule, ranks, microbatches):
        slots = graph_slots(row)
        captured = [work for passes in captured_passes(row, slots) for work in passes]
        kinds = {(stage, m): [kind for s, kind, n in row if (s, n) == (stage, m)] for stage, _, m in captured}
        assert len(captured) == len(set(captured)) == sum(map(len, kinds.values()))
        for (stage, m), slot in slots.items():
            assert [kind for s, kind, n in row if (s, n) == (stage, m)] == kinds[stage, slot.captured]
            assert slots[stage, slot.captured] == slot


def test_graphs_do_not_grow_with_the_number_of_microbatches() -> None:
    def captured(microbatches: int) -> list[int]:
        found = (graph_slots(row).items() for row in rows("v-half", 4, microbatches))
        return [len({(stage, slot) for (stage, _), slot in slots}) for slots in found]

    assert captured(64) == captured(24)
    assert max(captured(24)) < 2 * 24 / 2


def test_a_whole_and_a_split_backward_have_graphs_of_their_own() -> None:
    row = [Pass(0, kind, m) for kind, m in ((Kind.F, 0), (Kind.B, 0), (Kind.F, 1), (Kind.I, 1), (Kind.W, 1))]
    row += [Pass(0, kind, 2) for kind in (Kind.F, Kind.B)]
    assert {m: tuple(slot) for (_, m), slot in graph_slots(row).items()} == {0: (0, 0), 1: (0, 1), 2: (0, 0)}


def test_a_csv_keeps_its_backwards() -> None:
    csv = "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n"
    order = plan(Request("file", 2, 2, csv=csv, alike=True)).order
    assert [" ".join(map(str, row)) for row in order] == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"]
