"""The order in which graphs are captured, and the static inputs that it needs."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import pytest
import torch

from megatron.schedules.integration.graphs.order import (
    GraphNumbers,
    LayerPass,
    Place,
    engine_order,
    graphed_passes,
    layer_passes,
    one_by_one,
    set_static_inputs,
    share_masks,
)
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.program import Program
from megatron.schedules.schedule.kinds import Kind


def programs(schedule: str, microbatches: int) -> tuple[Program, ...]:
    request = Request(schedule, 4, microbatches)
    made = plan(request)
    return proved(made, request.costs_on(made.placement))


@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("schedule", ["zb-1p", "v-half", "interleaved-1f1b"])
def test_each_layer_and_microbatch_has_its_forward_then_its_i_then_its_w(schedule: str, microbatches: int) -> None:
    for program in programs(schedule, microbatches):
        chunks = program.placement.chunks
        layers = [1 + chunk % 2 for chunk in range(chunks)]
        places = list(GraphNumbers(layers, microbatches))
        passes = list(layer_passes(graphed_passes(program), program.placement, layers))
        order = engine_order(passes, places, lambda chunk, layer: layer == 0)
        of_number = defaultdict(list)
        for number in order:
            of_number[abs(int(number))].append(number)
        assert sorted(of_number) == list(range(1, sum(layers) * microbatches + 1))
        split = {each.place for each in passes if each.kind is Kind.W}
        for number, place in enumerate(places, 1):
            defers = place in split and place.layer == 0
            assert of_number[number] == [number, -number] + [-number - 0.5] * defers


def test_numbers_are_those_of_megatrons_graphs() -> None:
    """Chunk by chunk, in a chunk microbatch by microbatch, in a microbatch layer by layer."""
    layers = [2, 0, 1]
    numbers = GraphNumbers(layers, 3)
    assert [numbers(*key) for key in numbers] == list(range(9))
    before = [0, *accumulate(layers)]
    assert numbers(2, 1, 0) == before[2] * 3 + 1
    assert numbers(0, 2, 1) == 2 * 2 + 1


def test_stocks_allocation_sees_one_microbatch_at_a_time() -> None:
    assert one_by_one(2, 2) == [1, -1, 1, -1, 2, -2, 2, -2]


def test_static_inputs_are_shared_by_none_that_are_in_flight_together() -> None:
    """Backwards come in another order than forwards, which stock's allocation does not expect."""
    kinds = (Kind.F, Kind.F, Kind.I, Kind.F, Kind.I, Kind.F, Kind.I, Kind.I)
    which = (0, 1, 1, 2, 0, 3, 3, 2)
    passes = [LayerPass(kind, Place(0, m, 0)) for kind, m in zip(kinds, which, strict=True)]
    order = engine_order(passes, list(GraphNumbers([1], 4)), lambda *_: False)
    table, mask = torch.zeros(3), torch.zeros(2, dtype=torch.bool)
    args = [(torch.ones(2, 2, requires_grad=True),)] * 4
    kwargs = [{"rotary_pos_emb": table, "attention_mask": mask}] * 4
    set_static_inputs(order, args, kwargs)
    sets = [args[m][0].data_ptr() for m in range(4)]
    assert len(set(sets)) == 2, "two are in flight at most"
    in_flight: set[int] = set()
    for number in order:
        where = sets[abs(int(number)) - 1]
        assert (where in in_flight) == (number < 0)
        (in_flight.add if number > 0 else in_flight.remove)(where)
    assert all(each[0].requires_grad for each in args)
    assert all(each["rotary_pos_emb"] is table for each in kwargs), "it is the same for all"
    assert [each["attention_mask"].data_ptr() for each in kwargs].count(mask.data_ptr()) == 0


def test_a_mask_that_no_layer_reads_is_allocated_once() -> None:
    order = [1, 2, -1, -2]
    args = [(torch.ones(2),), (torch.ones(2),)]
    kwargs = [{"attention_mask": torch.zeros(2)}, {"attention_mask": torch.zeros(2)}]
    share_masks(kwargs)
    set_static_inputs(order, args, kwargs, shares_mask=True)
    assert kwargs[0]["attention_mask"] is kwargs[1]["attention_mask"]
    assert args[0][0].data_ptr() != args[1][0].data_ptr()
