"""How many floating point operations of weight gradients run behind a message."""

from __future__ import annotations

import pytest

from megatron.schedules.runtime.behind_messages import FLOPS_PER_BYTE, MessageBudget
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential

# One stage a rank, so twice these times: F waits .4 for messages, I .8, and W takes 1.6.
COSTS = Costs(LayerTimes(1.0, 1.1, 0.8, (0.2, 0.4))).on(sequential(2))
W_FLOPS = 1600.0


def begun(costs=COSTS, sent=(30, 10, 60)) -> MessageBudget:
    """The budget of a rank after the first F and I of a microbatch."""
    budget = MessageBudget(costs)
    for kind in (Kind.F, Kind.I):
        budget.begin(kind, 0)
        for each in sent:
            budget.behind(each)
            budget.left(0.0)
    budget.deferred(0, W_FLOPS)
    return budget


@pytest.mark.parametrize(("kind", "waited"), [(Kind.F, 0.4), (Kind.I, 0.8)])
def test_a_pass_hides_as_much_of_w_as_the_plan_says_shared_out_by_bytes(kind, waited):
    budget = begun()
    budget.begin(kind, 0)
    found = []
    for each in (30, 10, 60):
        found.append(budget.behind(each))
        budget.left(0.0)
    assert found == pytest.approx([share * waited / 1.6 * W_FLOPS for share in (0.3, 0.1, 0.6)])


def test_what_a_message_leaves_is_for_the_next_of_the_same_pass():
    budget = begun()
    budget.begin(Kind.F, 0)
    assert budget.behind(30) == pytest.approx(120)
    budget.left(-25.0)  # a piece took longer than the message
    assert budget.behind(10) == pytest.approx(40 - 25)
    budget.left(15.0)
    budget.begin(Kind.F, 0)
    assert budget.behind(30) == pytest.approx(120 * 100 / 40)  # the last F of this stage sent 40 bytes


def test_a_stage_that_waits_for_no_message_hides_nothing():
    budget = begun(Costs(LayerTimes(1.0, 1.1, 0.8, (0.0, 0.4))).on(sequential(2)))
    budget.begin(Kind.F, 0)
    assert budget.behind(30) == 0


@pytest.mark.parametrize("costs", [None, Costs.of(1.0, 1.1, 0.8).on(sequential(2))])
def test_a_plan_without_messages_takes_them_for_those_of_a_network(costs):
    budget = begun(costs)
    budget.begin(Kind.F, 0)
    assert budget.behind(30) == 30 * FLOPS_PER_BYTE
