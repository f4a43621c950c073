"""Recompute and offload in plans: what R, O and L cost, hold and free, and which stages are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.job.job_request import request_of
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import memory_limit, memory_saving, schedule_choice
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.memory_saving import save_memory
from megatron.schedules.planner.plan_cache import cached_saving
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential, zigzag
from megatron.schedules.schedule.schedule import in_microbatch_order
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.text_forms import from_csv, from_json, to_csv, to_json
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.climb import Entry, race
from megatron.schedules.search.list_scheduling import Policy, list_schedule, space_for
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.problem import Problem
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import tasks_of
from megatron.schedules.utils.errors import PlanError

REAL = Costs.of(1, 1.1, 0.75, 0.05)


def timed(csv: str, costs: Costs, decisions: Decisions) -> Timeline:
    schedule = from_csv(csv)
    assert from_json(to_json(schedule)) == schedule and to_csv(schedule) == csv
    return simulate(schedule, costs.on(schedule.placement, decisions))


def spans(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {str(work): (start, end) for work, start, end in timeline.copies[rank]}


def test_a_forward_done_again_keeps_its_input_until_then():
    costs, again = Costs(LayerTimes(3, 2, 1), memory=MemoryShares(layer_input=0.25)), Decisions(recomputed=(1.0,))
    timeline = timed("0F0,0F1,0R1,0I1,0W1,0R0,0I0,0W0\n", costs, again)
    # One chunk is two halves of a rank's layers.
    assert timeline.end[0] == (6, 12, 18, 22, 24, 30, 34, 36)
    held = [held for _, held in timeline.memory(0)]
    assert held == [0, 0.25, 0.5, 1.25, 0.25, 1.0, 0]
    assert timeline.ideal == 36, "what is recomputed is computing, too"


def test_where_no_r_comes_a_forward_keeps_all():
    timeline = timed("0F0,0F1,0B1,0R0,0B0\n", Costs(memory=MemoryShares(layer_input=0.2)), Decisions(recomputed=(0.5,)))
    assert timeline.end[0][3] - timeline.end[0][2] == 1, "half of the layers are recomputed"
    # A fifth of the recomputed or offloaded half stays.
    assert timeline.peak == pytest.approx(1 + 0.6)


def test_a_copy_begins_with_its_forwards_end_and_ends_at_its_place():
    timeline = timed(
        "0F0,0F1,0O0,0O1,0L1,0I1,0W1,0L0,0I0,0W0\n", Costs(copies=HostCopies(3)), Decisions(offloaded=(1.0,))
    )
    # A forward takes 2 and a copy 6: the second waits for the channel, computing for both.
    assert spans(timeline, 0)["0O0"] == (2, 8)
    assert spans(timeline, 0)["0O1"] == (8, 14)
    assert timeline.start[0][2:4] == timeline.end[0][2:4] == (8, 14)
    assert spans(timeline, 0)["0L1"] == (14, 20)
    assert timeline.start[0][5] == 20, "I waits for what is loaded"
    assert spans(timeline, 0)["0L0"] == (24, 30), "a copy back begins at its place"
    assert timeline.peak == 2
    assert [held for _, held in timeline.memory(0)] == [0, 1, 2, 1, 0, 1, 0, 1, 0]
    assert timeline.ideal == 12 and timeline.makespan == 34


def test_one_channel_for_both_ways_is_shared():
    csv = "0F0,0O0,0F1,0L0,0O1,0I0,0W0,0L1,0I1,0W1\n"
    both, one = (timed(csv, Costs(copies=HostCopies(1, way)), Decisions(offloaded=(1.0,))) for way in (False, True))
    # The second forward ends at 6; its copy goes at once, and that back with it or after it.
    assert spans(both, 0)["0O1"] == (6, 8) and spans(both, 0)["0L0"] == (6, 8)
    assert spans(one, 0)["0O1"] == (6, 8) and spans(one, 0)["0L0"] == (8, 10)


@pytest.mark.parametrize(
    ("csv", "fault"),
    [
        ("0F0,0B0,0R0\n", "0B0 stands before 0R0, which it needs"),
        ("0R0,0F0,0B0\n", "0R0 stands before 0F0, which it needs"),
        ("0F0,0R0,0R0,0B0\n", "0R0 stands 2 times"),
        ("0F0,0O0,0B0\n", "0L0 is missing: 0O0 is of no use without it"),
        ("0F0,0L0,0B0\n", "0O0 is missing: 0L0 is of no use without it"),
        ("0F0,0L0,0O0,0B0\n", "0L0 stands before 0O0, which it needs"),
        ("0F0,0O0,0B0,0L0\n", "0B0 stands before 0L0, which it needs"),
    ],
)
def test_invalid_saving_passes_are_refused(csv: str, fault: str):
    with pytest.raises(PlanError, match=fault):
        from_csv(csv)


@st.composite
def saved(draw: st.DrawFn) -> tuple[Problem, float]:
    """A small problem with some recompute and offload, and a limit under which it works."""
    chunks, ranks = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 4))
    placement = zigzag(ranks, chunks) if chunks > 1 else sequential(ranks)
    parts = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=placement.stages, max_size=placement.stages)
    offloaded = draw(parts)
    recomputed = [min(part, 1 - out) for part, out in zip(draw(parts), offloaded, strict=True)]
    costs = replace(REAL, copies=HostCopies(draw(st.sampled_from([0.1, 0.7, 2.0])), draw(st.booleans())))
    decisions = Decisions(recomputed=tuple(recomputed), offloaded=tuple(offloaded))
    problem = Problem(placement, draw(st.integers(1, 6)), costs.on(placement, decisions))
    return problem, problem.least * draw(st.sampled_from([1.0, 1.3, 2.0, 8.0]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(asked=saved(), seed=st.integers(0, 99))
def test_what_the_search_finds_is_what_is_simulated(asked: tuple[Problem, float], seed: int):
    problem, limit = asked
    (climb,), _ = race([Entry(problem, [problem.order()])], limit, 20 * problem.effort)
    found = replace(problem.schedule, order=problem.rows(climb.best))
    validate(found)
    timeline = simulate(found, problem.costs)
    assert timeline.makespan == pytest.approx(climb.makespan), "contention is the same"
    assert timeline.peak <= limit + 1e-6
    bound = lower_bound(problem.placement, found.microbatches, problem.costs, limit)
    assert bound <= timeline.makespan + 1e-6
    in_turn = in_microbatch_order(found)
    validate(in_turn)
    assert simulate(in_turn, problem.costs).makespan <= timeline.makespan + 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(asked=saved(), seed=st.integers(0, 99), backward=st.booleans(), just_in_time=st.booleans())
def test_compiled_or_not_copies_are_scheduled_alike(
    asked: tuple[Problem, float], seed: int, backward: bool, just_in_time: bool
):
    problem, limit = asked
    tasks, _ = tasks_of(problem.schedule, problem.costs)
    tasks = tasks.reversed() if backward else tasks
    order = list(range(problem.size))
    order = tasks.reversed_order(order) if backward else order
    policy = Policy(12, noise=0.05, seed=seed, patience=0.5, just_in_time=just_in_time)
    limits = [limit] * problem.placement.ranks
    found = list(order)
    list_schedule(tasks.both.forward, order, limits, policy, space_for(tasks.both.forward), found)
    assert Rounds(tasks, compiled=True).settled(order, limits, policy)[0].tolist() == found


def shortest(problem: Problem, limit: float) -> float:
    """The makespan that a short search from one microbatch after another finds."""
    (climb,), _ = race([Entry(problem, [problem.order()])], limit, 500 * problem.effort)
    found = replace(problem.schedule, order=problem.rows(climb.best))
    validate(found)
    timeline = simulate(found, problem.costs)
    assert timeline.peak <= limit + 1e-6
    return timeline.makespan


# A rank computes for 61.6 and 45.6; where no microbatch may overtake another the same search finds 110.9 and 136.9.
@pytest.mark.parametrize(("saving", "most"), [("recomputed", 76.0), ("offloaded", 72.0)])
def test_half_a_microbatch_of_memory_lets_several_be_under_way(saving: str, most: float):
    placement = zigzag(4, 4)
    decisions = Decisions(**{saving: (1.0,) * placement.stages})
    assert shortest(Problem(placement, 8, replace(REAL, copies=HostCopies(1.425)).on(placement, decisions)), 0.5) < most


def test_recompute_overtakes_with_the_passes_that_free_its_memory():
    """Both microbatches' gradients come at once, and memory is enough for one recompute: the second need not wait."""
    costs, again = Costs(memory=MemoryShares(layer_input=0.1)), Decisions(recomputed=(1.0,))
    problem = Problem(sequential(1), 2, costs.on(sequential(1), again))
    passes = {str(work): number for number, work in enumerate(problem.passes)}
    names = "0F0,0F1,0R0,0I0,0W0,0R1,0I1,0W1"
    order = np.array([passes[each] for each in names.split(",")])
    # It passes over tasks at random; some seed takes R of microbatch 1 before that of microbatch 0.
    found = [problem.settled(order, 1.1, Policy(8, noise=0.5, seed=seed))[0] for seed in range(20)]
    rows = [[problem.passes[task] for task in each] for each in found]
    assert any(row.index(problem.passes[passes["0R1"]]) < row.index(problem.passes[passes["0R0"]]) for row in rows)
    assert all(problem.fits(each, 1.1) for each in found)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    asked=saved(),
    seed=st.integers(0, 2**30),
    lookahead=st.sampled_from([4, 16, 64]),
    noise=st.sampled_from([0.0, 0.3]),
)
def test_rounds_with_saving_passes_stay_valid_and_within_the_limit(
    asked: tuple[Problem, float], seed: int, lookahead: int, noise: float
):
    problem, limit = asked
    order = problem.order()
    for round_ in range(6):
        policy = Policy(lookahead, bool(round_ & 1), (0.0, 0.5, 1.0)[round_ % 3], noise=noise, seed=seed + round_)
        policy = policy._replace(just_in_time=bool(round_ & 2))
        there = order.tolist()
        order, _, _ = problem.settled(order, limit, policy, backwards=bool(round_ % 2))
        assert sorted(order.tolist()) == sorted(there) and problem.fits(order, limit)
        validate(replace(problem.schedule, order=problem.rows(order)))


def asked(limit: float, *, d: int = 4, n: int = 8, **how: bool) -> Request:
    costs = replace(REAL, copies=HostCopies(2.85 / 4)) if how.get("offload") else REAL
    return Request("adaptive", d, n, costs, memory_limit=limit, search_seconds=0.1, **how)


def makespan(request: Request) -> float:
    schedule = plan(request)
    validate(schedule)
    timeline = simulate(schedule, request.costs_on(schedule.placement))
    assert request.memory_limit is not None
    assert timeline.limit <= request.memory_limit * request.ranks + 1e-6
    return timeline.makespan


@pytest.mark.parametrize(
    ("limit", "how"), [(0.25, {"recompute": True}), (0.25, {"offload": True}), (0.5, {"recompute": True})], ids=str
)
def test_memory_saving_never_makes_a_plan_longer(limit: float, how: dict[str, bool]):
    without, chosen = asked(limit), save_memory(asked(limit, **how))
    assert not chosen.recompute and not chosen.offload
    assert makespan(chosen) <= makespan(without) + 1e-9
    if limit == 0.25:
        assert makespan(chosen) < 0.8 * makespan(without)
        assert (Kind.R in plan(chosen).kinds) == ("recompute" in how)


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [0.15, 0.25, 0.375])
def test_both_together_are_no_longer_than_either(limit: float):
    request = replace(asked(limit, recompute=True, offload=True), costs=replace(REAL, copies=HostCopies(0.7)))
    alone = [save_memory(replace(request, recompute=False)), save_memory(replace(request, offload=False))]
    assert makespan(save_memory(request)) <= min(map(makespan, alone)) + 1e-9


def test_less_memory_works_than_without():
    assert least_limit(asked(1)) == 0.25, "a microbatch"
    low = asked(0.13, recompute=True)
    assert least_limit(low) < 0.13
    with pytest.raises(PlanError, match=r"a memory limit of 0\.13 of 1F1B's is too small for 4 ranks: 0\.25 is"):
        plan(asked(0.13))
    assert makespan(save_memory(low)) > 0


def test_whole_layers_are_recomputed_where_their_number_is_known(tmp_path, monkeypatch):
    from megatron.schedules.estimate.models import MODELS
    from megatron.schedules.estimate.times import loads

    monkeypatch.setenv("MEGATRON_SCHEDULES_CACHE", str(tmp_path))
    request = replace(asked(0.3, recompute=True), costs=replace(REAL, model=loads(MODELS["Llama-3-8B"].whole)))
    request = replace(request, chunk_choices=(2,))
    chosen = cached_saving(request)
    assert chosen.costs == request.costs, "costs never change"
    assert cached_saving(request) == chosen, "the kept one is the same"
    assert chosen.decisions.recomputed is not None
    layers = chosen.layers_on(plan(chosen).placement)
    assert layers is not None
    for part, count in zip(chosen.decisions.recomputed, layers, strict=True):
        assert part * count == pytest.approx(round(part * count))


# At an eighth of 1F1B's memory, by ranks and microbatches: what a plain greedy order in time comes to.
_GREEDY = [(4, 16, {"recompute": True}, 130.9), (4, 16, {"offload": True}, 149.0), (6, 24, {"recompute": True}, 197.9)]


@pytest.mark.nightly
@pytest.mark.parametrize(("d", "n", "how", "greedy"), _GREEDY)
def test_the_default_search_is_no_longer_than_a_greedy_order(d: int, n: int, how: dict[str, bool], greedy: float):
    costs = replace(REAL, copies=HostCopies(1.425))
    request = Request("adaptive", d, n, costs, memory_limit=0.125, chunk_choices=(1, 2, 4), **how)
    assert makespan(save_memory(request)) <= greedy + 1e-6


@pytest.mark.parametrize("saving", ["none", "recompute"])
@pytest.mark.parametrize(
    ("schedule", "limit", "most"),
    [("adaptive", 0.24, 8), ("auto", 0.24, 8), ("adaptive:4", 0.24, 4), ("auto", 0.25, 4)],
)
def test_8_chunks_are_tried_where_a_rank_may_hold_less_than_a_microbatch(
    schedule: str, limit: float, most: int, saving: str
):
    settings = Settings(
        schedule_choice("schedule", schedule),
        memory_limit("memory_limit", str(limit)),
        saving=memory_saving("save_memory", saving),
    )
    flags = dict.fromkeys(("costs", "layers", "memory_limit", "model", "offload"), "")
    found = request_of(JobSpec(settings, ParallelSizes(4, 4), microbatches=16, flags=flags)).request
    assert max(found.chunk_choices) == (most if saving == "recompute" else 4)


@pytest.mark.parametrize("how", [{"recompute": True}, {"offload": True}], ids=str)
def test_8_chunks_give_shorter_plans_there(how: dict[str, bool]):
    request = Request(
        "adaptive", 4, 16, replace(REAL, copies=HostCopies(1.425)), memory_limit=0.125, search_seconds=0.3, **how
    )
    few, more = (makespan(save_memory(replace(request, chunk_choices=each))) for each in ((1, 2, 4), (1, 2, 4, 8)))
    assert more < 0.95 * few


# What a plain prototype came to, makespans at d = 8, n = 32 where the work is 182.4: by memory, recompute chosen by
# stage, and offload where one way takes a quarter of the computing, and half.
_PROTOTYPE = {0.125: (263, 227, 251), 0.25: (229, 195, 200), 0.375: (220, 189, 189), 0.5: (210, 187, 187)}


@pytest.mark.nightly
@pytest.mark.parametrize("limit", _PROTOTYPE)
def test_plans_hold_what_was_promised(limit: float):
    again, *offload = _PROTOTYPE[limit]
    request = Request("adaptive", 8, 32, REAL, memory_limit=limit, chunk_choices=(1, 2, 4, 8), recompute=True)
    assert makespan(save_memory(request)) < again + 0.5
    for share, most in zip((4, 2), offload, strict=True):
        costs = replace(REAL, copies=HostCopies(2.85 / share))
        request = replace(request, costs=costs, recompute=False, offload=True)
        assert makespan(save_memory(request)) < 1.03 * most
