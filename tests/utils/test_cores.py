"""The search uses all cores, and comes to the same plan on however many."""

from __future__ import annotations

import threading

import pytest

from megatron.schedules.planner.adaptive import placements
from megatron.schedules.planner.layer_partition import partition_layers
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.search.climb import Entry, OrderClimb, contest, race
from megatron.schedules.search.problem import Problem
from megatron.schedules.utils.cores import THREADS_VARIABLE, on_all_cores, threads
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import REAL
from tests.planner.test_vocabulary_passes import costs as with_an_output_layer

REQUESTS = [
    Request("adaptive", 4, 9, Costs.parse(REAL), memory_limit=0.6, search_seconds=0.3),
    Request("adaptive", 4, 6, with_an_output_layer(16), memory_limit=0.75, search_seconds=0.1),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=["even", "shared vocabulary"])
def test_the_plan_is_the_same_on_however_many_threads(request_: Request, monkeypatch: pytest.MonkeyPatch):
    found = []
    for count in ("1", "2", "5"):
        monkeypatch.setenv(THREADS_VARIABLE, count)
        found.append(plan(request_))
    assert found[0] == found[1] == found[2]


@pytest.mark.nightly
def test_so_are_the_layers(monkeypatch: pytest.MonkeyPatch):
    asked = Request("adaptive", 3, 6, with_an_output_layer(12, shared=False), memory_limit=0.9, search_seconds=0.05)
    found = []
    for count in ("1", "3"):
        monkeypatch.setenv(THREADS_VARIABLE, count)
        found.append(partition_layers(asked))
    assert found[0] == found[1]


def test_as_many_run_at_a_time_as_there_are_threads(monkeypatch: pytest.MonkeyPatch):
    """Each of three waits until all three are there."""
    collective = threading.Barrier(3, timeout=20)
    monkeypatch.setenv(THREADS_VARIABLE, "3")
    assert sorted(on_all_cores([collective.wait] * 3)) == [0, 1, 2]
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    assert on_all_cores([threading.get_ident] * 3) == [threading.get_ident()] * 3


def test_what_comes_back_is_in_order_and_what_is_raised_arrives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(THREADS_VARIABLE, "4")
    assert on_all_cores([lambda k=k: k for k in range(20)]) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        on_all_cores([lambda k=k: 1 // k for k in range(3)])


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "٣", "²"])
def test_a_number_of_threads_that_is_none_is_refused(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(THREADS_VARIABLE, given)
    with pytest.raises(PlanError, match=f"MEGATRON_SCHEDULES_THREADS must be a whole number from 1 on, not '{given}'"):
        threads()


def test_a_race_gets_as_much_as_it_was_given_and_never_loses_to_a_start():
    request = REQUESTS[0]
    problems = [Problem(placement, 9, request.costs.on(placement)) for placement in placements(request)]
    (found,), _ = race([Entry(problems[0], [problems[0].order()])], 3.0, 300 * problems[0].effort)
    entries = [Entry(problem, [problem.order()]) for problem in problems]
    entries[0] = Entry(problems[0], [found.best, problems[0].order()])
    for rounds in (1, 30, 500):
        budget = rounds * sum(problem.effort for problem in problems)
        climbs, spent = race(entries, 3.0, budget)
        assert climbs[0].makespan <= found.makespan + 1e-9
        assert [climb.problem for climb in climbs] == problems
        if rounds >= 30:
            assert spent == pytest.approx(budget, rel=0.5)


def test_climbs_that_compete_find_the_same_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch):
    """The longer one of two placements drops out, with what it has reached."""
    request = REQUESTS[0]
    problems = [Problem(placement, 9, request.costs.on(placement)) for placement in placements(request)]
    passes, found = 400 * problems[0].effort, []
    for number in ("1", "3"):
        monkeypatch.setenv(THREADS_VARIABLE, number)
        shares: list[float] = []
        climbs = contest([Entry(each, [each.order()] * 4) for each in problems], 3.0, passes, shares.append)
        assert sum(shares) == pytest.approx(1)
        assert [climb.problem for climb in climbs] == problems
        found.append([(climb.makespan, climb.best.tolist()) for climb in climbs])
    assert found[0] == found[1]


def test_a_climb_ends_where_no_order_can_be_shorter():
    problem = Problem(sequential(1), 4, REQUESTS[0].costs.on(sequential(1)))
    climb = OrderClimb(problem, 4.0, problem.order(), 0)
    assert climb.run(10_000, late=False) == 1, "the first order already has no gap"
    assert climb.makespan == pytest.approx(problem.bound(4.0))
