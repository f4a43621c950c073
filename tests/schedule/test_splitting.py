"""The price of a split backward: I and W together take longer than B."""

from __future__ import annotations

import pytest

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential, zigzag
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.utils.errors import PlanError

PRICED = Costs(LayerTimes(20.0, 22.0, 15.0, splitting=2.0))


@pytest.mark.parametrize("placement", [sequential(4), zigzag(4, 2)], ids=["1 chunk", "V"])
def test_a_whole_backward_takes_i_and_w_less_the_price(placement):
    on = PRICED.on(placement).durations
    share = 2 * placement.ranks / placement.stages
    for stage in range(placement.stages):
        assert on[Kind.B][stage] == pytest.approx(share * (22 + 15 - 2))
        assert on[Kind.I][stage] + on[Kind.W][stage] == pytest.approx(share * 37)


def test_costs_without_a_price_are_as_before():
    for costs in (Costs(), Costs.of(20, 22, 15, 1)):
        on = costs.on(zigzag(4, 2))
        assert on.splitting == () and on.without_splitting is on


@pytest.mark.parametrize(
    ("name", "splits"), [("1f1b", False), ("interleaved-1f1b", False), ("v-half", True), ("zb-1p", True)]
)
def test_only_schedules_that_split_pay_the_price(name: str, splits: bool):
    request = Request(name, 4, 8, PRICED, chunks=2)
    plan = make_plan(request)
    paid = plan.timeline.ideal - 8 * 2 * (20 + 22 + 15 - 2)
    # A pair of I and W that follow each other may be one B.
    assert 0 < paid <= 8 * 2 * 2 if splits else paid == pytest.approx(0)
    where = plan.schedule.placement
    assert lower_bound(where, 8, PRICED.on(where), 4.0) <= plan.iteration_time


def test_the_price_keeps_its_part_in_another_unit():
    assert PRICED.scaled(lambda time: time / 10).layers.splitting == pytest.approx(0.2)


def test_a_price_of_all_of_i_and_w_is_refused():
    with pytest.raises(PlanError, match="price of a split backward"):
        LayerTimes(1.0, 1.0, 1.0, splitting=2.0)
