"""A plan for microbatches of different lengths: never worse, in turn, within memory, the same everywhere."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from megatron.schedules.planner.microbatch_lengths import LengthsPlanner, candidates
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule, gradients_complete
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import MicrobatchLoads
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search import compiled, moves
from megatron.schedules.search.rounds import work_for
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import written
from tests.planner.test_microbatch_order import ONCE, sequences

COSTS = Costs(LayerTimes(1, 1.6, 0.5, attention=(0.6, 0.75)), link=Link(0.02))
SETTINGS = {
    "v-half": Request("v-half", 4, 10, COSTS),
    "1f1b": Request("1f1b", 4, 9, COSTS),
    "adaptive": Request("adaptive", 4, 8, COSTS, memory_limit=0.75, search_seconds=0.05),
    "interleaved-1f1b": Request("interleaved-1f1b", 4, 8, COSTS),
}


def packed(n: int, seed: int, tokens: int = 1000) -> MicrobatchLoads:
    """Microbatches of as many tokens each, in sequences of very different lengths."""
    draw = random.Random(seed)
    cuts = [sorted(draw.sample(range(1, tokens), draw.choice((0, 0, 1, 4, 30)))) for _ in range(n)]
    return MicrobatchLoads.of([[b - a for a, b in zip([0, *cut], [*cut, tokens], strict=True)] for cut in cuts], tokens)


def varied(n: int, seed: int) -> MicrobatchLoads:
    """Microbatches of one sequence each, none longer than the standard one."""
    draw = random.Random(seed)
    return MicrobatchLoads.of([[draw.randint(30, 1000)] for _ in range(n)], 1000)


def test_times_and_memory_follow_tokens_and_squares():
    loads = MicrobatchLoads.of([[1000], [400, 100], [250] * 4], 1000)
    assert loads.tokens == (1, 0.5, 1)
    assert loads.squares == pytest.approx((1, 0.17, 0.25))
    costs = replace(Costs(LayerTimes(2, 3, 1, attention=(0.5, 0.4))).on(sequential(2)), loads=loads)
    row = [Pass(0, kind, m) for kind in (Kind.F, Kind.I, Kind.W, Kind.B) for m in range(3)]
    one_chunk = [2 * each for each in (2, 1 * 0.5 + 1 * 0.17, 1 + 0.25)]
    assert costs.durations_of(row)[:3] == pytest.approx(one_chunk)
    assert costs.durations_of(row)[3:6] == pytest.approx(
        [2 * (1.8 * t + 1.2 * q) for t, q in ((1, 1), (0.5, 0.17), (1, 0.25))]
    )
    assert costs.durations_of(row)[6:9] == pytest.approx([2, 1, 2])
    assert costs.durations_of(row)[9:] == pytest.approx(
        [a + b for a, b in zip(costs.durations_of(row)[3:6], (2, 1, 2), strict=True)]
    )
    assert costs.changes_of(row[:3]) == [1, 0.5, 1]


def test_attention_of_recomputed_forwards_counts_in_i():
    plain, again = (
        Costs(LayerTimes(2, 3, 1, attention=(0.5, 0.4), stock_recompute=share)).on(sequential(2)) for share in (0, 1)
    )
    assert plain.of_attention[Kind.I] == pytest.approx((2.4, 2.4))
    assert again.of_attention[Kind.I] == pytest.approx((4.4, 4.4))


def test_an_iteration_is_timed_by_its_microbatches():
    schedule = written(sequential(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    loads = MicrobatchLoads((1.0, 0.5), (1.0, 0.25))
    timeline = simulate(schedule, replace(Costs.of(0.5, 0.5, 0.5).on(sequential(2)), loads=loads))
    assert timeline.end == ((1, 1.5, 6, 7), (2, 4, 4.5, 5.5))
    assert timeline.peaks == (1.5, 1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("made", [packed, varied])
def test_a_plan_is_valid_in_turn_within_memory_and_shorter(name, made):
    request = SETTINGS[name]
    base = plan(request)
    planner = LengthsPlanner(base, request.costs)
    lengths = []
    for seed in range(4):
        loads = made(request.microbatches, seed)
        found, usual = planner.plan(loads, 100_000), planner.usual(loads)
        validate(found.schedule)
        assert sorted(found.order) == list(range(request.microbatches))
        assert all(sequence == sorted(sequence) for sequence in sequences(found.schedule, (*ONCE, (Kind.W, Kind.B))))
        assert list(map(completion, found.schedule.order)) == list(map(completion, base.order))
        for row, limit in zip(found.schedule.order, planner.limits, strict=True):
            assert max(accumulate(held_by_hand(row, request.costs, base, loads.in_order(found.order)))) <= limit + 1e-9
        lengths.append(found.timeline.makespan / usual.timeline.makespan)
    assert max(lengths) <= 1
    assert sum(lengths) / len(lengths) < 0.95


def completion(row) -> list[int]:
    """The stages of a rank in the order in which their gradients are complete."""
    complete = gradients_complete(row)
    return sorted(complete, key=lambda stage: complete[stage])


def held_by_hand(row, costs: Costs, base: Schedule, loads: MicrobatchLoads) -> list[float]:
    """What each pass takes or gives back where I gives nothing back."""
    each = 1 / base.placement.chunks
    sign = {Kind.F: each, Kind.I: 0, Kind.W: -each, Kind.B: -each}
    return [sign[kind] * loads.tokens[m] for _, kind, m in row]


def test_times_are_those_of_the_microbatches_in_their_new_order():
    request = SETTINGS["v-half"]
    planner, loads = LengthsPlanner(plan(request), request.costs), packed(10, 7)
    found = planner.plan(loads, 50_000)
    assert found.timeline.costs.loads == MicrobatchLoads(
        tuple(loads.tokens[m] for m in found.order), tuple(loads.squares[m] for m in found.order)
    )
    assert found.timeline.makespan == simulate(found.schedule, found.timeline.costs).makespan


def test_machine_code_and_python_find_the_same(monkeypatch):
    request = Request("v-half", 2, 4, COSTS)
    loads, base = packed(4, 3), plan(request)
    once = LengthsPlanner(base, COSTS).plan(loads, 8_000)
    called = []

    def interpreted(both, limits, sizes, rules, drawn, rounds, _, *orders):
        called.append(1)
        return moves.climb(both, limits, sizes, rules, drawn, rounds, work_for(both)[0], *orders)

    monkeypatch.setattr(compiled, "compiled_climb", lambda: interpreted)
    again = LengthsPlanner(base, COSTS).plan(loads, 8_000)
    assert called and (again.order, again.schedule) == (once.order, once.schedule)


def test_planning_again_finds_the_same():
    request = SETTINGS["v-half"]
    planner, loads = LengthsPlanner(plan(request), COSTS), packed(10, 1)
    first = planner.plan(loads, 50_000)
    planner.plan(packed(10, 2), 50_000)
    again = planner.plan(loads, 50_000)
    assert (again.order, again.schedule) == (first.order, first.schedule)


def test_microbatches_that_are_alike_get_the_usual_plan():
    request = SETTINGS["v-half"]
    planner, base = LengthsPlanner(plan(request), COSTS), plan(request)
    found = planner.plan(MicrobatchLoads((0.5,) * 10, (0.2,) * 10))
    assert found.order == tuple(range(10)) and found.schedule == base


def test_longer_than_standard_ones_hold_no_more_than_in_the_usual_plan():
    request = SETTINGS["v-half"]
    planner = LengthsPlanner(plan(request), COSTS)
    loads = MicrobatchLoads((1.3,) * 10, tuple(0.1 + 0.15 * k for k in range(10)))
    found, usual = planner.plan(loads, 50_000), planner.usual(loads)
    assert all(mine <= theirs + 1e-9 for mine, theirs in zip(found.timeline.peaks, usual.timeline.peaks, strict=True))
    assert found.timeline.makespan < usual.timeline.makespan


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_candidates_are_orders_of_all_microbatches(n):
    found = candidates(np.linspace(1, 2, n).tolist())
    assert found and all(sorted(order) == list(range(n)) for order in found)


def test_another_number_of_microbatches_is_refused():
    planner = LengthsPlanner(plan(SETTINGS["1f1b"]), COSTS)
    with pytest.raises(PlanError, match="lengths of 3 microbatches given for a plan of 9"):
        planner.plan(packed(3, 1))
    with pytest.raises(PlanError, match="one token or more"):
        MicrobatchLoads.of([[3], []], 3)
