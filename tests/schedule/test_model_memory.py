"""Bytes of a model's parts: what stages keep of them, and what limits and plans make of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.schedule.cost_parts import LayerTimes, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory, Passing
from megatron.schedules.schedule.placement import sequential, zigzag

LAYER = LayerMemory(full=100.0, kept=100.0, weights=90.0, parameters=7.0)
ENDS = {"first": EndMemory(5.0, 0.0, 70.0), "last": EndMemory(40.0, 10.0, 80.0)}
MODEL = ModelMemory((LAYER,) * 8, input=6.0, **ENDS)
COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any)


@settings(deadline=None)
@given(COUNTS, st.data())
def test_stages_together_keep_what_the_model_keeps(counts: list[int], data: st.DataObject):
    model = replace(MODEL, layers=(LAYER,) * sum(counts))
    offloaded = [data.draw(st.integers(0, count)) for count in counts]
    recomputed = [data.draw(st.integers(0, count - moved)) for count, moved in zip(counts, offloaded, strict=True)]
    stages = model.by_stage(counts, recomputed, offloaded)
    total = sum(stage.forward + stage.recomputed + stage.offloaded for stage in stages)
    assert total == pytest.approx(100 * sum(counts) + 5 + 40)
    assert sum(stage.recomputed for stage in stages) == pytest.approx((100 - 6) * sum(recomputed))
    assert sum(stage.offloaded for stage in stages) == pytest.approx(100 * sum(offloaded))
    assert sum(stage.weights for stage in stages) == pytest.approx(90 * sum(counts) + 10)
    assert sum(stage.parameters for stage in stages) == pytest.approx(7 * sum(counts) + 150)


def test_a_mask_is_kept_by_the_stages_that_get_the_batch_if_they_have_layers():
    masked = replace(MODEL, mask=3.0)
    for counts, ends in (((2, 2, 2, 2), (3, 0, 0, 3)), ((0, 4, 4, 0), (0, 0, 0, 0)), ((8,), (3,))):
        plain, more = (model.by_stage(counts) for model in (MODEL, masked))
        assert tuple(b.forward - a.forward for a, b in zip(plain, more, strict=True)) == ends


def test_megatrons_recompute_keeps_inputs_and_holds_a_layer_for_a_moment():
    full = replace(MODEL, recomputed_layers=None, together=2)
    first, middle, *_ = full.by_stage((3, 3, 2))
    assert (first.forward, middle.forward) == (2 * 6 + 5, 2 * 6)
    # Two layers at once, of which the input is kept anyway, after the third, whose input is free; in I its W stays.
    assert full.passing((3, 3, 2))[1] == Passing(194.0 - 6.0, 194.0 - 6.0 + 90.0)
    # After the loss, whose W stays in I.
    assert full.passing((3, 3, 2))[-1] == Passing(194.0 - 40.0, 194.0 - 40.0 + 10.0)
    assert full.most_passing == 200.0


def test_layers_that_are_not_recomputed_are_freed_before_those_that_are():
    first = replace(MODEL, recomputed_layers=1)
    assert first.by_stage((3, 5))[1].forward == 6 + 4 * 100 + 40
    assert first.passing((3, 5))[0] == Passing(0.0, 94.0 - 2 * 100.0 + 2 * 90.0)


def test_megatrons_selective_recompute_holds_those_parts_for_a_moment():
    selective = replace(MODEL, layers=(LAYER._replace(kept=60.0),) * 8)
    assert selective.by_stage((4, 4))[1].forward == 4 * 60 + 40
    assert selective.passing((4, 4))[0] == Passing(40.0)
    assert selective.most_passing == 40.0


def test_measured_bytes_take_the_place_of_estimates():
    measured = MODEL.measured([50.0] * 8, 0.5, 3.0, (1.0, 2.0), recomputed=False)
    assert measured.layers[0] == LayerMemory(50.0, 50.0, 25.0, 7.0)
    assert (measured.input, measured.first.kept, measured.last.kept) == (3.0, 1.0, 2.0)
    assert measured.first.parameters == MODEL.first.parameters
    of_device = replace(MODEL, of_device=True).measured([50.0] * 8, 0.5, 3.0, (1.0, 2.0), recomputed=False).of_device
    assert of_device, "a limit stays what parameters leave of a device"


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_model_of_equal_layers_costs_what_equal_shares_do(chunks: int):
    """Shares of memory given by hand, and bytes that come to the same."""
    loads = ModelLoads(Part(), (Part(split=Load(1, 1, 1, 100.0)),) * 8, Part())
    shares = Costs(LayerTimes(1, 1.1, 0.75), loads, memory=MemoryShares(0.9, layer_input=0.06))
    plain = replace(MODEL, first=EndMemory(), last=EndMemory())
    recomputed = tuple([1.0, 0.0] * (2 * chunks))[: 2 * chunks]
    placement = zigzag(2, chunks) if chunks > 1 else zigzag(2, 1)
    by_shares, by_bytes = (
        costs.on(placement, Decisions(recomputed=recomputed)) for costs in (shares, replace(shares, memory=plain))
    )
    for kind in Kind:
        assert by_bytes.changes[kind] == pytest.approx(by_shares.changes[kind])


def test_a_rank_with_more_parameters_than_average_has_less_room_but_for_one_microbatch():
    placement = sequential(2)
    costs = replace(Costs().on(placement), standing=(3.0, 1.0))
    assert costs.least_by_rank(placement) == [1.0, 1.0]
    assert costs.limits(placement, 4.0) == [3.0, 4.0]
    assert costs.within(placement, [3.0, 4.0]) == 4.0 == costs.within(placement, [3.0, 1.0])
    assert costs.limits(placement, 1.5) == [1.0, 1.5]
    assert replace(costs, of_device=True).limits(placement, 1.5) == [0.5, 1.5], "a device has no more than it has"
