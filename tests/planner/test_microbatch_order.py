"""Every stage does its microbatches in ascending order, as data come and as 1F1B adds up gradients."""

from __future__ import annotations

import pytest
from hypothesis import given

from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule, in_microbatch_order
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.schedule.validation import validate
from tests.planner.made_schedules import REAL, costed_schedules, examples, timed, written

# Kinds that a stage does once for each microbatch, or at most once.
ONCE = ((Kind.F,), (Kind.I, Kind.B), (Kind.W,))


def sequences(schedule: Schedule, once: tuple[tuple[Kind, ...], ...] = ONCE) -> list[list[int]]:
    """The microbatches in the order each stage does the passes of such kinds."""
    return [
        [work.microbatch for work in row if work.stage == stage and work.kind in kinds]
        for row in schedule.order
        for stage in {work.stage for work in row}
        for kinds in once
    ]


@examples(200)
@given(costed_schedules())
def test_renumbering_changes_neither_times_nor_memory(made: tuple[Schedule, Costs]):
    schedule, costs = made
    renumbered = in_microbatch_order(schedule)
    validate(renumbered)
    assert all(found == sorted(found) for found in sequences(renumbered))
    before, after = timed(schedule, costs), timed(renumbered, costs)
    assert after.peaks == before.peaks
    assert after.makespan <= before.makespan + 1e-9


def test_a_csv_that_takes_microbatches_out_of_turn_is_renumbered():
    csv = "0F1,0F0,0I1,0B0,0W1\n1F0,1F1,1B1,1B0\n"
    found = plan(Request("file", 2, 2, csv=csv)).order
    assert found == written(sequential(2), 2, "0F0 0F1 0I0 0B1 0W0", "1F0 1F1 1B0 1B1").order


def test_an_optional_pass_stays_with_its_backward():
    csv = "0F1,0F0,0R1,0I1,0R0,0B0,0W1\n1F0,1F1,1R1,1B1,1B0\n"
    found = plan(Request("file", 2, 2, csv=csv)).order
    assert found == written(sequential(2), 2, "0F0 0F1 0R0 0I0 0R1 0B1 0W0", "1F0 1F1 1R0 1B0 1B1").order


def test_where_it_would_come_before_its_forward_the_schedule_is_left_as_it_is():
    csv = "0F1,0R1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n"
    assert to_csv(plan(Request("file", 2, 2, csv=csv))) == csv


@pytest.mark.parametrize("name", [name for name in NAMES if name != "file"])
def test_every_plan_takes_microbatches_in_microbatch_order(name: str):
    """Weight gradients too, whether added up by a W or by a whole backward."""
    for d, n in ((2, 5), (4, 9), (5, 12)):
        request = Request(name, d, n, Costs.parse(REAL), memory_limit=0.6, search_seconds=0.1)
        found = sequences(plan(request), (*ONCE, (Kind.W, Kind.B)))
        assert all(sequence == sorted(sequence) for sequence in found)
