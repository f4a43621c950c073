"""Decisions: what is settled about stages, apart from what these cost."""

from __future__ import annotations

import pytest

from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import SAVING, Kind, Share
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.utils.errors import PlanError


def test_costs_have_times_of_those_savings_alone_that_were_decided():
    costs, where = Costs(copies=HostCopies(0.5)), sequential(2)
    assert not costs.on(where).times.keys() & SAVING
    recomputing = costs.on(where, Decisions(recomputed=(0.5, 0.0)))
    assert recomputing.times.keys() & SAVING == {Kind.R}
    assert recomputing.times[Kind.R] == (1.0, 0.0)
    offloading = costs.on(where, Decisions(offloaded=(0.0, 1.0)))
    assert offloading.times.keys() & SAVING == {Kind.O, Kind.L}
    assert offloading.times[Kind.O] == offloading.times[Kind.L] == (0.0, 1.0)
    assert offloading.held[Share.OFFLOADED] == (0.0, 1.0)


@pytest.mark.parametrize("name", ["recomputed", "offloaded"])
def test_decisions_for_another_number_of_stages_are_refused(name: str):
    with pytest.raises(PlanError, match="shares of 4 stages given for v") as caught:
        Costs().on(v_shape(4), Decisions(**{name: (1.0,) * 4}))
    assert caught.value.about == name


def test_saving_nothing_is_the_same_as_not_having_decided_it():
    placed = Decisions(layers=(1, 2))
    assert placed.saving([0.0, 0.0], [0.0, 0.0]) == placed
    found = placed.saving([0.5, 0.0], [0.0, 0.0])
    assert found == Decisions((1, 2), (0.5, 0.0), None)
    assert (found.mean_savings, PLAIN.mean_savings) == ({"recomputed": 0.25}, {})
