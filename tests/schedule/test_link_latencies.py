"""Link latencies by pair of ranks: whatever counts a message uses the latency of its pair of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.tasks import tasks_of
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import NAMED, examples, schedules
from tests.planner.slow_oracle import slow_spans

LATENCIES = st.lists(st.integers(0, 12).map(lambda quarters: quarters / 4), min_size=16, max_size=16)


def with_latency(costs: Costs, ranks: int, times: list[float]) -> Costs:
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    latencies = tuple((*pair, time) for pair, time in zip(pairs, times, strict=False))
    return replace(costs, link=replace(costs.link, pairs=latencies))


@examples(60)
@given(schedules(), LATENCIES)
def test_every_message_takes_the_latency_of_its_link(schedule: Schedule, times: list[float]):
    costs = with_latency(Costs.of(1, 1.5, 0.5, 0.25), schedule.ranks, times)
    timeline = simulate(schedule, costs.on(schedule.placement))
    spans = slow_spans(schedule, costs)
    assert spans is not None
    for row, starts in zip(schedule.order, timeline.start, strict=True):
        assert starts == pytest.approx([spans[work][0] for work in row])


@pytest.mark.parametrize("name", NAMED)
def test_equal_link_latencies_are_as_one_number(name: str):
    costs = Costs.of(1, 1.25, 0.75, 0.5)
    alike = with_latency(Costs.of(1, 1.25, 0.75), 4, [0.5] * 16)
    assert plan(Request(name, 4, 9, costs)) == plan(Request(name, 4, 9, alike))


def test_a_search_knows_them():
    made = plan(Request("1f1b", 3, 4))
    costs = Costs(link=Link(0.25, ((1, 2, 7.0),))).on(made.placement)
    tasks, passes = tasks_of(made, costs)
    delays = {
        (made.placement.rank_of[passes[source].stage], made.placement.rank_of[passes[task].stage]): tasks.before.delay[
            at
        ]
        for task in range(len(passes))
        for at in range(tasks.before.start[task], tasks.before.start[task + 1])
        for source in [tasks.before.task[at]]
    }
    assert {pair: delay for pair, delay in delays.items() if pair[0] != pair[1]} == {
        (0, 1): 0.25,
        (1, 0): 0.25,
        (1, 2): 7.0,
        (2, 1): 0.25,
    }


def test_the_lower_bound_counts_each_way():
    """One microbatch on three ranks: three F, three I, the last W, and four messages."""
    costs = Costs(link=Link(0.25, ((1, 2, 7.0), (2, 1, 3.0)))).on(sequential(3))
    assert lower_bound(sequential(3), 1, costs, 3.0) == pytest.approx(14 + 0.25 + 7 + 3 + 0.25)


def test_a_plan_goes_round_a_slow_link():
    """With a latency of two passes 1F1B waits; an order planned for it keeps more in flight and waits less."""
    costs = Costs(link=Link(pairs=((1, 2, 4.0), (2, 1, 4.0))))
    blind, seeing = (plan(Request("zb-2p", 4, 16, each)) for each in (Costs.of(1, 1, 1), costs))
    blind_time, seeing_time = (simulate(each, costs.on(each.placement)).makespan for each in (blind, seeing))
    assert seeing_time < blind_time


@pytest.mark.parametrize("latency", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_is_none_is_refused(latency: float):
    with pytest.raises(PlanError, match="the P2P latency must be zero or a positive number"):
        Costs(link=Link(pairs=((0, 1, latency),)))
