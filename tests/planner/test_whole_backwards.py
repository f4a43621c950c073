"""References of a verification: the same plan with whole backwards, in which every gradient's sum keeps its order."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.times import loads
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.planner.whole_backwards import references
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.schedule.validation import validate

COSTS = Costs.of(1, 1.1, 0.75, 0.05)
NAMED = [name for name in NAMES if name not in ("adaptive", "file")]


def others(schedule: Schedule) -> list[list[Pass]]:
    """All passes but backwards, rank by rank."""
    return [[work for work in row if work.kind not in (Kind.I, Kind.W, Kind.B)] for row in schedule.order]


def turns(schedule: Schedule, kind: Kind) -> dict[int, list[int]]:
    """Microbatches of each stage in the order of its passes of ``kind``, alone or in a B."""
    found: dict[int, list[int]] = defaultdict(list)
    for _, work in schedule.passes():
        if work.kind in (kind, Kind.B):
            found[work.stage].append(work.microbatch)
    return found


def shuffled(schedule: Schedule, seed: int) -> Schedule:
    """The schedule with the W's of each rank at random places after their I's."""
    draw, rows = random.Random(seed), []
    for row in schedule.order:
        left = [work for work in row if work.kind is not Kind.W]
        for work in [work for work in row if work.kind is Kind.W]:
            left.insert(draw.randint(left.index(work._replace(kind=Kind.I)) + 1, len(left)), work)
        rows.append(tuple(left))
    return replace(schedule, order=tuple(rows))


@pytest.mark.parametrize("name", NAMED)
def test_a_plan_has_one_reference_with_the_same_order_and_no_more_memory(name: str):
    for ranks, microbatches in product((2, 3, 4), (1, 2, 5, 8)):
        schedule = plan(Request(name, ranks, microbatches, COSTS))
        (reference,) = references(schedule)
        assert reference.kinds.isdisjoint((Kind.I, Kind.W)) and reference.placement == schedule.placement
        assert others(reference) == others(schedule)
        assert turns(reference, Kind.B) == turns(schedule, Kind.W) == turns(schedule, Kind.I)
        costs = COSTS.on(schedule.placement)
        assert all(
            ours <= its + 1e-9 for ours, its in zip(peaks(reference, costs), peaks(schedule, costs), strict=True)
        )
        check(lower(reference, costs))


def test_a_schedule_that_splits_nothing_is_its_own_reference():
    schedule = plan(Request("1f1b", 4, 6, COSTS))
    assert references(schedule) == (schedule,)


SAVING = "0F0,0O0,0F1,0L0,0I0,0R1,0W0,0I1,0W1\n1F0,1O0,1L0,1I0,1F1,1W0,1R1,1I1,1W1"


def test_recompute_offload_and_vocabulary_passes_stay_where_they_are():
    model = replace(loads(MODELS["Llama-3-8B"].whole), shared_vocabulary=True)
    shared = plan(Request("zb-1p", 3, 5, replace(COSTS, model=model)))
    for schedule, kinds in ((from_csv(SAVING), {Kind.R, Kind.O, Kind.L}), (shared, {Kind.S, Kind.T})):
        (reference,) = references(schedule)
        assert reference.kinds == {Kind.F, Kind.B, *kinds} and others(reference) == others(schedule)
        check(lower(reference))


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p", "v-half", "v-min", "v-zb"])
def test_where_w_has_another_order_than_i_one_reference_has_either_and_both_end(name: str):
    for ranks, microbatches, seed in product((2, 4), (3, 6), range(4)):
        schedule = shuffled(plan(Request(name, ranks, microbatches, COSTS)), seed)
        validate(schedule)
        if turns(schedule, Kind.I) == turns(schedule, Kind.W):
            continue
        by_i, by_w = references(schedule)
        assert turns(by_i, Kind.B) == turns(schedule, Kind.I)
        assert turns(by_w, Kind.B) == turns(schedule, Kind.W)
        for reference in (by_i, by_w):
            forwards = [[work for work in row if work.kind is Kind.F] for row in reference.order]
            assert forwards == others(schedule)  # so random numbers are drawn in the same order
            check(lower(reference))


def test_a_backward_that_others_wait_for_lets_a_forward_go_ahead():
    """B of microbatch 1 comes first on the last stage and needs both forwards, which would wait for B of 0 before."""
    text = "0F0,0I0,0F1,0I1,0W1,0W0\n1F0,1I0,1F1,1I1,1W1,1W0"
    _, by_w = references(from_csv(text))
    assert [" ".join(map(str, row)) for row in by_w.order] == ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]
