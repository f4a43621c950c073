"""Polishing: what is handed out keeps the limit and is no longer than its base."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.polish import many_plans, polish
from tests.planner.made_schedules import costed_schedules, examples, timed


@examples(100)
@given(costed_schedules(), st.sampled_from((0.0, 1.0, 2.5, 100.0)))
def test_a_polished_order_is_sound_no_longer_and_within_its_limit(made: tuple[Schedule, Costs], limit: float):
    schedule, costs = made
    on_stages = costs.on(schedule.placement)
    around_one = costs.around_one().on(schedule.placement)
    polished = polish(schedule, around_one, limit)
    validate(polished)
    assert timed(polished, costs).makespan <= timed(schedule, costs).makespan + 1e-9
    for held, own in zip(peaks(polished, on_stages), peaks(schedule, on_stages), strict=True):
        assert held <= max(limit, own) + 1e-9
    assert polish(schedule, around_one, limit) == polished, "the same every time"


@examples(40)
@given(costed_schedules())
def test_among_many_plans_each_is_as_if_made_alone(made: tuple[Schedule, Costs]):
    """Those of one order under other times share what does not depend on times."""
    schedule, costs = made
    layers = costs.layers
    slower = replace(costs, layers=replace(layers, forward=2 * layers.forward, weight_grad=layers.weight_grad / 2))
    later = replace(costs, link=replace(costs.link, latency=costs.link.latency + 0.5))
    on_stages = [each.around_one().on(schedule.placement) for each in (costs, slower, later, costs)]
    with many_plans(math.inf):
        together = [polish(schedule, each, 2.5) for each in on_stages]
    assert together == [polish(schedule, each, 2.5) for each in on_stages]
