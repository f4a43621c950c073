"""The parts of the adaptive search: compiled list scheduling, the lower bound, how near the best there is it comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.schedules.planner.adaptive import bound
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement, sequential, v_shape, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.climb import Entry, race
from megatron.schedules.search.frontier import frontier, ladder
from megatron.schedules.search.list_scheduling import Policy, list_schedule, space_for
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.problem import Problem, one_by_one
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import Tasks, tasks_of
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import REAL, costed_schedules, examples, planned, timed

# --- list scheduling ----------------------------------------------------------------------------------------------

POLICIES = st.builds(
    Policy,
    lookahead=st.integers(1, 40),
    defer_fillers=st.booleans(),
    patience=st.sampled_from((0.0, 0.5, 0.6, 1.0)),
    noise=st.sampled_from((0.0, 0.02, 0.5)),
    seed=st.integers(0, 2**30),
)


def with_messages(made: tuple[Schedule, Costs]) -> tuple[Problem, Costs]:
    """The problem of a schedule, with messages of experts in half of each F and I."""
    schedule, costs = made
    forward, input_grad, _ = costs.layers.passes
    costs = replace(costs, layers=replace(costs.layers, messages=(forward / 2, input_grad / 2)))
    return Problem(schedule.placement, schedule.microbatches, costs.on(schedule.placement)), costs


@examples(100)
@given(costed_schedules(), POLICIES, st.sampled_from((0.0, 0.5, 2.0)), st.booleans())
def test_with_messages_the_makespan_is_that_of_the_simulator(
    made: tuple[Schedule, Costs], policy: Policy, spare: float, backwards: bool
):
    """Weight gradients behind messages are those that the order itself hides, within the limit."""
    problem, costs = with_messages(made)
    order = problem.order(made[0])
    limit = max(problem.peaks(order)) + spare
    found, makespan, _ = problem.settled(order, limit, policy, backwards=backwards, most=2)
    assert problem.fits(found, limit)
    timeline = timed(replace(problem.schedule, order=problem.rows(found)), costs)
    assert timeline.makespan == pytest.approx(makespan, rel=1e-12)
    for row in timeline.schedule.order:
        due, weights = ([work[::2] for work in row if work.kind is kind] for kind in (Kind.I, Kind.W))
        assert due == weights, "in the order in which they become due"
    validate(timeline.schedule)


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "most"), [(8.5, 198.0), (5.5, 218.0)])
def test_a_short_search_keeps_enough_weight_gradients_due(limit: float, most: float):
    """With all messages exposed, no order of four chunks takes less than 225, whatever its memory."""
    made = Costs(LayerTimes(1.3, 1.4, 0.75, (0.3, 0.3)), link=Link(0.05), memory=MemoryShares(0.6))
    costs, placement = made.around_one(), zigzag(8, 4)
    problem = Problem(placement, 32, costs.on(placement))
    (best,), _ = race([Entry(problem, [problem.order()])], limit, 11e6)
    unit = made.layers.forward / costs.layers.forward
    assert problem.fits(best.best, limit)
    assert best.makespan * unit <= most
    exposed = made.without_messages
    assert lower_bound(placement, 32, exposed.on(placement), limit) > 225


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "most"), [(8.5, 198.0), (5.5, 218.0), (8.0, 225.0), (5.0, 225.0)])
def test_adaptive_hides_messages(limit: float, most: float):
    costs = Costs(LayerTimes(1.3, 1.4, 0.75, (0.3, 0.3)), link=Link(0.05), memory=MemoryShares(0.6))
    timeline = timed(plan(Request("adaptive", 8, 32, costs, memory_limit=limit / 8)), costs)
    assert timeline.makespan <= most
    assert timeline.peak <= limit + 1e-9


def in_python(tasks: Tasks, order: list[int], limit: float, policy: Policy) -> tuple[list[int], float]:
    """The same round on plain lists, interpreted."""
    found, limits = list(order), [limit] * (len(tasks.first) - 1)
    instance = tasks.both.forward
    makespan = list_schedule(instance, order, limits, policy, space_for(instance), found)
    return found, makespan


@examples(150)
@given(costed_schedules(), POLICIES, st.sampled_from((0.0, 0.5, 2.0)))
def test_compiled_and_in_python_a_round_makes_the_same_choices(
    made: tuple[Schedule, Costs], policy: Policy, spare: float
):
    schedule, costs = made
    on_stages = costs.on(schedule.placement)
    problem = Problem(schedule.placement, schedule.microbatches, on_stages)
    tasks, _ = tasks_of(problem.schedule, on_stages)
    order = problem.order(schedule)
    split = Schedule("split", schedule.placement, schedule.microbatches, problem.rows(order))
    assert max(problem.peaks(order)) == pytest.approx(timed(split, costs).peak)
    limit = max(problem.peaks(order)) + spare

    forward, makespan, _ = problem.settled(order, limit, policy)
    assert (forward.tolist(), makespan) == in_python(tasks, order.tolist(), limit, policy)
    turned, limits = tasks.reversed_order(order.tolist()), [limit] * schedule.ranks
    reverse, _ = in_python(tasks.reversed(), turned, limit, policy)
    backward, _, _ = Rounds(tasks.reversed(), compiled=True).settled(turned, limits, policy)
    assert backward.tolist() == reverse
    backward = np.array(tasks.reversed_order(reverse))
    # There and back, as long as that gains.
    how: dict[str, Any] = {"backwards": schedule.microbatches % 2 == 0, "most": 3}
    settled, *rest = Rounds(tasks, compiled=False).settled(order.tolist(), limits, policy, **how)
    again, *others = problem.settled(order, limit, policy, **how)
    assert (again.tolist(), others) == (settled, rest)

    for one in (forward, backward):
        made_of_it = Schedule("made", schedule.placement, schedule.microbatches, problem.rows(one))
        validate(made_of_it)
        assert simulate(made_of_it, on_stages).peak <= limit + 1e-6


ANY_POLICY = st.builds(
    Policy,
    lookahead=st.integers(-(2**65), 2**65),
    defer_fillers=st.booleans(),
    patience=st.floats(),
    ends_only=st.booleans(),
    noise=st.floats(),
    seed=st.integers(-(2**65), 2**65),
)


def outcome(make: Callable[[], tuple[Any, float, int]]) -> tuple[list[int], float] | str:
    """Order and makespan, or that the policy was refused."""
    try:
        order, makespan, _ = make()
    except ValueError:
        return "refused"
    return list(order), makespan


@examples(200)
@given(ANY_POLICY | POLICIES)
@example(Policy(2**31 - 1, seed=2**31 - 1, noise=0.5))
@example(Policy(2**63))
@example(Policy(8, patience=math.inf))
def test_any_policy_is_refused_or_followed_alike_by_python_and_machine_code(policy: Policy):
    """Numbers that machine code would hold otherwise, and choices that leave tasks out, give no order at all."""
    problem = Problem(v_shape(3), 4, Costs.parse(REAL).on(v_shape(3)))
    tasks, _ = tasks_of(problem.schedule, problem.costs)
    limits = [2.0] * 3
    start = range(problem.size)
    compiled = outcome(lambda: Rounds(tasks, compiled=True).settled(start, limits, policy))
    assert outcome(lambda: Rounds(tasks, compiled=False).settled(start, limits, policy)) == compiled
    assert compiled == "refused" or sorted(compiled[0]) == list(range(problem.size))


@examples(100)
@given(st.floats(-300, 308), st.sampled_from(["times", "comm"]))
def test_any_times_are_planned_for_or_refused(exponent: float, what: str):
    """Costs are checked when they are given; stage costs may hold any number, and sums of them more than a float."""
    costs = Costs.parse(REAL).on(v_shape(2))
    factor = 10.0**exponent
    times = {kind: tuple(factor * each for each in row) for kind, row in costs.times.items()}
    costs = replace(costs, times=times) if what == "times" else replace(costs, comm=factor)
    try:
        problem = Problem(v_shape(2), 3, costs)
    except PlanError:
        assert exponent > 290
        return
    order, makespan, _ = problem.settled(problem.order(), 2.0, Policy(8, patience=0.5))
    assert sorted(order.tolist()) == list(range(problem.size))
    assert makespan == pytest.approx(simulate(replace(problem.schedule, order=problem.rows(order)), costs).makespan)


def test_an_order_above_its_limits_is_refused():
    problem = Problem(v_shape(3), 4, Costs().on(v_shape(3)))
    tasks, _ = tasks_of(problem.schedule, problem.costs)
    for compiled in (False, True):
        with pytest.raises(ValueError, match="within its limits"):
            Rounds(tasks, compiled=compiled).settled(range(problem.size), [0.1] * 3, Policy(8))


def test_a_search_does_not_start_from_orders_that_only_whole_backwards_keep_within_the_limit():
    # Recomputing, F keeps less than I leaves to W: 1F1B holds less than its split form does.
    costs = Costs(LayerTimes(stock_recompute=1.0), memory=MemoryShares(0.9, kept=0.5))
    whole = timed(plan(Request("1f1b", 3, 8, costs)), costs)
    problem = Problem(sequential(3), 8, costs.on(sequential(3)))
    assert max(problem.peaks(problem.order(whole.schedule))) > whole.peak
    for rung in frontier([problem], [whole], 3.0, 2_000_000):
        assert rung.timeline.peak <= rung.limit + 1e-6
        assert rung.best.makespan == pytest.approx(rung.timeline.makespan)


def test_noise_shows_other_orders_and_its_seed_says_which():
    on_stages = Costs.parse(REAL).on(v_shape(4))
    problem = Problem(v_shape(4), 8, on_stages)
    order = problem.order(planned("v-half", 4, 8, REAL).schedule)
    noisy = [problem.settled(order, 3.0, Policy(16, noise=0.05, seed=seed))[0] for seed in (1, 2, 1)]
    assert np.array_equal(noisy[0], noisy[2])
    assert not np.array_equal(noisy[0], noisy[1])


@pytest.mark.parametrize("placement", [sequential(3), v_shape(3), zigzag(3, 4)], ids=str)
def test_one_microbatch_after_another_takes_the_least_memory(placement: Placement):
    schedule = one_by_one(placement, 4)
    validate(schedule)
    assert timed(schedule).peaks == (1, 1, 1)


# --- the bound ----------------------------------------------------------------------------------------------------


@examples(300)
@given(costed_schedules(max_ranks=5, max_microbatches=6))
def test_no_schedule_is_shorter_than_the_bound_for_the_memory_it_takes(made: tuple[Schedule, Costs]):
    schedule, costs = made
    timeline = timed(schedule, costs)
    least = lower_bound(schedule.placement, schedule.microbatches, timeline.costs, timeline.peak)
    assert 0 <= least <= timeline.makespan + 1e-6


@pytest.mark.parametrize("name", ["zb-2p", "v-zb"])
def test_where_only_the_way_in_is_idle_the_bound_says_so(name: str):
    timeline = planned(name, 4, 8)
    assert lower_bound(timeline.schedule.placement, 8, timeline.costs, timeline.peak) == timeline.makespan


@pytest.mark.parametrize(
    ("d", "n", "limit", "costs", "chunks", "least"),
    [
        # One microbatch at a time: on each, rank 0 waits for two F, two I, two messages and a W, twice as long each.
        (2, 5, 0.5, (1, 2, 3, 0.5), 1, 5 * (4 + 8 + 1 + 6)),
        # A single microbatch: its way through three ranks and back, and one W.
        (3, 1, 1, (1, 2, 3, 0.5), 1, 6 + 12 + 4 * 0.5 + 6),
        # Memory to spare: the last rank starts three forwards late and works without a pause.
        (4, 8, 1, (20, 20, 20, 0), 2, 1020),
    ],
    ids=["memory", "chain", "work"],
)
def test_where_it_is_known_the_bound_is_the_optimum_and_the_search_finds_it(
    d: int, n: int, limit: float, costs: tuple[float, ...], chunks: int, least: float
):
    request = Request(
        "adaptive", d, n, Costs.of(*costs), memory_limit=limit, chunk_choices=(chunks,), search_seconds=0.05
    )
    assert bound(request) == pytest.approx(least)
    assert timed(plan(request), request.costs).makespan == pytest.approx(least)


# --- how good it is -----------------------------------------------------------------------------------------------

# Within so many microbatches, 8 of them on the V of four ranks: the optimum, proved by a constraint solver, or the
# shortest known.
OPTIMA = {
    (20, 20, 20, 0): {2: 1180, 4: 1020},
    (20, 22, 15, 1): {4: 987},
    (20, 24, 8, 1): {2: 1226, 2.5: 1130, 3: 1030},
}
SHORTEST = {(20, 20, 20, 0): {2.5: 1120, 3: 1060}, (20, 22, 15, 1): {2: 1257, 2.5: 1147, 3: 1065}}
CASES = [
    (costs, limit, length, proved)
    for table, proved in ((OPTIMA, True), (SHORTEST, False))
    for costs, lengths in table.items()
    for limit, length in lengths.items()
]


def length(costs: tuple[int, int, int, int], limit: float, *chunks: int) -> float:
    request = Request(
        "adaptive", 4, 8, Costs.of(*costs), memory_limit=limit / 4, chunk_choices=chunks, search_seconds=0.5
    )
    return timed(plan(request), request.costs).makespan


@pytest.mark.parametrize(("costs", "limit", "best", "proved"), CASES)
def test_four_ranks_come_within_one_percent_of_the_best_v_and_finer_chunks_beat_it(
    costs: tuple[int, int, int, int], limit: float, best: float, proved: bool
):
    on_the_v = length(costs, limit, 2)
    assert on_the_v <= 1.01 * best
    if proved:
        assert on_the_v >= best - 1e-6
    assert length(costs, limit, 1, 2, 4) < 0.98 * best


@pytest.mark.nightly
def test_eight_ranks_idle_less_than_1f1b_in_half_its_memory():
    """And under a quarter of what it idles in all of it; 5 microbatches are what V-Half takes."""
    most = {4: planned("1f1b", 8, 32, REAL).bubble, 5: 0.11, 8: 0.0475}
    assert most[4] == pytest.approx(0.1918, abs=1e-4)
    for limit, bubble in most.items():
        request = Request("adaptive", 8, 32, Costs.parse(REAL), memory_limit=limit / 8, search_seconds=1)
        timeline = timed(plan(request), request.costs)
        assert timeline.bubble < bubble
        assert timeline.peak <= limit


# --- the ladder of limits -----------------------------------------------------------------------------------------


def test_the_ladder_reaches_from_the_least_memory_to_all_that_anything_could_use():
    rungs = ladder(8, 32, [1.0], [8.0, 15.0, 5.0])
    assert (rungs[0], rungs[-1]) == (1, 16)
    assert {5, 8, 15} <= set(rungs)
    steps = [above - below for below, above in pairwise(rungs)]
    assert min(steps) > 0 and max(steps[:14]) <= 0.5
    assert ladder(8, 1, [1.0], [1.0]) == [1]
    assert ladder(2, 2, [1.0, 2.0], [2.0, 4.0])[-1] == 4, "as much as the placement that needs most"
    assert ladder(2, 3, [3.0], [])[0] == 3


def test_what_is_found_for_little_memory_does_not_depend_on_how_much_there_is():
    """Else more of it could cost time: every plan for more starts from those for less."""
    problems = [Problem(placement, 6, Costs.parse(REAL).on(placement)) for placement in (zigzag(3, 4), v_shape(3))]
    known = [planned(name, 3, 6, REAL) for name in ("v-min", "v-zb")]
    every = frontier(problems, known, 3.0, 1e5)
    assert len(every) > 4
    for most in range(2, len(every)):
        lower = frontier(problems, known, every[most - 1].limit, 1e5)
        assert [(rung.limit, rung.timeline) for rung in lower] == [(rung.limit, rung.timeline) for rung in every[:most]]
    assert all(above.timeline.makespan <= below.timeline.makespan for below, above in pairwise(every))
    assert all(rung.bound <= rung.timeline.makespan + 1e-9 and rung.timeline.peak <= rung.limit for rung in every)


@pytest.mark.parametrize("saving", [{}, {"recomputed": (1.0,) * 6}, {"offloaded": (0.5,) * 6}], ids=str)
def test_a_problem_under_other_costs_is_what_it_would_be_if_made_anew(saving: dict[str, tuple[float, ...]]):
    placement, decisions = v_shape(3), Decisions(**saving)
    both = (replace(Costs.of(forward, 1.1, 0.75, 0.05), copies=HostCopies(forward / 3)) for forward in (1.0, 1.7))
    costs = [each.on(placement, decisions) for each in both]
    one, anew = (Problem(placement, 4, each) for each in costs)
    under = one.under(costs[1])
    assert under is not None
    assert under.peaks(under.order()) == anew.peaks(anew.order())
    policy = Policy(16, noise=0.05, seed=1, patience=0.5)
    outcomes = [each.settled(each.order(), 2.0, policy, backwards=True, most=3) for each in (under, anew)]
    assert outcomes[0][0].tolist() == outcomes[1][0].tolist() and outcomes[0][1:] == outcomes[1][1:]
    assert one.under(replace(costs[1], comm=1.0)) is None, "other messages"
    other = {} if saving else {"recomputed": (1.0,) * 6}
    assert one.under(Costs().on(placement, Decisions(**other))) is None, "other passes"
