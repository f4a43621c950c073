"""The simulator agrees with a slow and simple one, and its figures are what their definitions say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule, gradients_complete
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import REAL, UNIT, costed_schedules, examples, planned, timed, written
from tests.planner.slow_oracle import held_at, slow_spans
from tests.programs.random_schedules import random_schedule


@examples(150)
@given(costed_schedules())
def test_every_pass_runs_when_the_slow_oracle_says(made: tuple[Schedule, Costs]):
    schedule, costs = made
    timeline, spans = timed(schedule, costs), slow_spans(schedule, costs)
    assert spans is not None
    for row, starts, ends in zip(schedule.order, timeline.start, timeline.end, strict=True):
        assert list(zip(starts, ends, strict=True)) == [pytest.approx(spans[work]) for work in row]


@examples(100)
@given(costed_schedules())
def test_makespan_and_bubbles_are_as_defined(made: tuple[Schedule, Costs]):
    schedule, costs = made
    timeline, spans = timed(schedule, costs), slow_spans(schedule, costs)
    assert spans is not None
    makespan = max(end for _, end in spans.values())
    work = [sum(spans[p][1] - spans[p][0] for p in row) for row in schedule.order]
    assert timeline.makespan == pytest.approx(makespan)
    assert timeline.bubble == pytest.approx(1 - sum(work) / schedule.ranks / makespan)
    own_spans = [max(spans[p][1] for p in row) - min(spans[p][0] for p in row) for row in schedule.order]
    assert timeline.span_bubble == pytest.approx(max(1 - w / s for w, s in zip(work, own_spans, strict=True)))
    if costs.model.divisible and not any(costs.layers.messages):
        forward, input_grad, weight_grad = costs.layers.passes
        ideal = schedule.microbatches * 2 * ((1 + costs.layers.stock_recompute) * forward + input_grad + weight_grad)
        assert timeline.bubble == pytest.approx(1 - ideal / makespan)


@examples(100)
@given(costed_schedules())
def test_memory_is_held_from_the_start_of_f_to_the_end_of_w(made: tuple[Schedule, Costs]):
    schedule, costs = made
    timeline, spans = timed(schedule, costs), slow_spans(schedule, costs)
    assert spans is not None
    for rank in range(schedule.ranks):
        steps = timeline.memory(rank)
        times = [time for time, _ in steps]
        assert times == sorted(times) and steps[0] == (0.0, 0.0)
        for index, (time, held) in enumerate(steps):
            until = times[index + 1] if index + 1 < len(times) else time + 1
            if until > time + 1e-6:  # between two steps: at one instant several may follow each other
                assert held == pytest.approx(held_at((time + until) / 2, rank, schedule, costs, spans))
        assert steps[-1][1] == pytest.approx(0), "all is given back"
        at_starts = [held_at(spans[p][0] + 1e-7, rank, schedule, costs, spans) for p in schedule.order[rank]]
        assert timeline.peaks[rank] == pytest.approx(max(at_starts))
    assert timeline.peak == max(timeline.peaks)


@pytest.mark.parametrize("costs", [UNIT, "20,22,15,0", "3,1,2,0"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 9), (3, 2), (4, 4), (5, 17), (8, 3), (16, 40)])
def test_1f1b_takes_what_its_closed_form_says(ranks: int, microbatches: int, costs: str):
    timeline, asked = planned("1f1b", ranks, microbatches, costs), Costs.parse(costs)
    period = 2 * sum(asked.layers.passes)
    assert timeline.makespan == pytest.approx((microbatches + ranks - 1) * period)
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert timeline.peaks == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def test_a_message_takes_time_between_ranks_and_none_within_one():
    """A V with one microbatch: the chain crosses between ranks twice forward and twice backward."""
    rows = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    without, with_latency = (timed(written(v_shape(2), 1, *rows), Costs(link=Link(latency))) for latency in (0.0, 10.0))
    assert with_latency.makespan == without.makespan + 4 * 10
    assert with_latency.start[1] == (11, 12, 36, 38)


def test_the_span_form_looks_at_the_worst_rank_between_its_own_first_start_and_last_end():
    """Rank 0 computes 6 of its 26; rank 1, five times as heavy, runs without a pause from 2 to 32."""
    timeline = timed(written(sequential(2), 1, "0F0 0I0 0W0", "1F0 1I0 1W0"), uneven(Costs(), (1, 5)))
    assert timeline.makespan == pytest.approx(32)
    assert timeline.bubble == pytest.approx(1 - (6 + 30) / 2 / 32)
    assert timeline.span_bubble == pytest.approx(20 / 26)


# --- orders that cannot finish ------------------------------------------------------------------------------------


def test_a_deadlock_names_each_rank_and_what_it_waits_at():
    stuck = written(v_shape(2), 1, "3F0 0F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    with pytest.raises(PlanError) as caught:
        simulate(stuck, Costs().on(stuck.placement))
    assert str(caught.value) == "written: the order cannot finish: rank 0 at 3F0, rank 1 at 1F0 wait for each other"


def test_an_order_finishes_exactly_where_the_oracle_finds_times():
    """Passes of random schedules moved about: some orders stay sound, some end up waiting in a circle."""
    sound = stuck = 0
    for seed in range(400):
        rng = random.Random(seed)
        schedule = random_schedule(seed, ranks=rng.randint(2, 4), microbatches=rng.randint(1, 4))
        order = [list(row) for row in schedule.order]
        for _ in range(rng.randint(1, 4)):
            row = rng.choice(order)
            row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
        moved = replace(schedule, order=tuple(map(tuple, order)))
        if slow_spans(moved, Costs()) is None:
            stuck += 1
            with pytest.raises(PlanError):
                validate(moved)
        else:
            sound += 1
            validate(moved)
    assert sound > 50 and stuck > 50


@examples(30)
@given(st.sampled_from(("1f1b", "zb-1p", "v-half")), st.integers(2, 5), st.integers(1, 6), st.integers(0, 10**6))
def test_named_schedules_run_as_the_slow_oracle_says(name: str, ranks: int, microbatches: int, seed: int):
    """Orders that mean something reach states that random ones do not."""
    rng = random.Random(seed)
    costs = Costs.of(*(rng.randint(1, 9) for _ in range(3)), rng.choice((0, 1, 5)))
    schedule = plan(Request(name, ranks, microbatches, Costs.parse(REAL)))
    spans = slow_spans(schedule, costs)
    assert spans is not None
    assert timed(schedule, costs).makespan == pytest.approx(max(end for _, end in spans.values()))
    assert {work.kind for work in spans} <= set(Kind)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_input_gradient_gives_back_what_no_weight_gradient_needs(share: float):
    schedule = written(sequential(2), 1, "0F0 0I0 0W0", "1F0 1I0 1W0")
    timeline = timed(schedule, Costs(memory=MemoryShares(share)))
    held = [level for _, level in timeline.memory(0)]
    assert held == [0.0, 1.0, *([share] if share < 1 else []), *([0.0] if share else [])]


def test_what_an_input_gradient_gives_back_makes_room():
    """Weight gradients can wait at no price then, and fill what was idle within the same memory."""
    for name, limit in (("zb-1p", 4), ("v-min", 2), ("v-half", 3), ("adaptive", 2)):
        kept = Costs.parse(REAL)
        given_back = replace(kept, memory=MemoryShares(0.0))
        asked = Request(name, 4, 12, kept, memory_limit=limit / 4, search_seconds=0.3)
        better = timed(plan(replace(asked, costs=given_back)), given_back)
        assert better.peak <= limit
        assert better.makespan < timed(plan(asked), kept).makespan


def test_what_is_recomputed_costs_time_in_the_input_gradient_and_memory_only_from_there():
    schedule = written(sequential(2), 1, "0F0 0I0 0W0", "1F0 1I0 1W0")
    timeline = timed(schedule, Costs(LayerTimes(1, 1, 1, stock_recompute=1.0), memory=MemoryShares(0.75, kept=0.125)))
    assert timeline.makespan == 2 * (1 + 1 + 2 + 2 + 1)
    assert timeline.memory(0) == ((0.0, 0.0), (0.0, 0.125), (8.0, 0.75), (14.0, 0.0))
    whole = timed(
        written(sequential(2), 1, "0F0 0B0", "1F0 1B0"),
        Costs(LayerTimes(stock_recompute=1.0), memory=MemoryShares(kept=0.125)),
    )
    assert whole.peak == 0.125


def test_a_split_backward_needs_room_for_what_it_recomputed():
    """A chunk of V-Half is half a rank's layers; a whole backward needs no room that counts."""
    costs = Costs(LayerTimes(stock_recompute=1.0), memory=MemoryShares(kept=0.0))
    assert timed(plan(Request("1f1b", 8, 16, costs)), costs).peak == 0
    assert timed(plan(Request("v-half", 8, 16, costs)), costs).peak >= 0.5
    assert timed(plan(Request("adaptive", 8, 16, costs, memory_limit=1 / 16, search_seconds=0.1)), costs).peak <= 0.5


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "v-half"])
def test_gradients_are_complete_at_each_stages_last_weight_gradient(name: str):
    for row in planned(name, 4, 6).schedule.order:
        complete = gradients_complete(row)
        assert complete.keys() == {work.stage for work in row}
        for stage, index in complete.items():
            assert row[index].kind in (Kind.W, Kind.B)
            assert not any(work.stage == stage and work.kind in (Kind.W, Kind.B) for work in row[index + 1 :])


# --- recomputed forwards, and copies -------------------------------------------------------------------------------


@pytest.mark.parametrize(("one_way", "later"), [(False, 0), (True, 3)])
def test_figures_count_computing_alone_and_copies_in_the_background(one_way: bool, later: float):
    """F takes 2, B 4, each copy 3; rank 0 sends half of what it holds away. On one channel the first L waits for it."""
    schedule = written(sequential(2), 2, "0F0 0F1 0O0 0L0 0O1 0B0 0L1 0B1", "1F0 1B0 1F1 1B1")
    timeline = timed(schedule, Costs(copies=HostCopies(3.0, one_way)), Decisions(offloaded=(0.5, 0.0)))
    copies = sorted((str(work), start, end) for work, start, end in timeline.copies[0])
    begun = [("0L0", 5 + later, 8 + later), ("0L1", 12 + later, 15 + later)]
    assert copies == [*begun, ("0O0", 2, 5), ("0O1", 5, 8)]
    assert timeline.makespan == 19 + later
    assert timeline.ideal == 12, "no copy is computing, however long its place was waited at"
    assert timeline.bubble == pytest.approx(1 - 12 / timeline.makespan)
    assert timeline.span_bubble == timeline.bubble, "rank 0 works from the first to the last moment"
    assert timeline.copying == pytest.approx((12 if one_way else 6) / timeline.makespan)
    assert (timeline.recomputed, timeline.useful) == (0, pytest.approx(12 / timeline.makespan))
    levels = (0, 1), (2, 2), (5, 1.5), (5, 2), (8, 1.5), (12 + later, 0.5), (12 + later, 1), (19 + later, 0)
    assert timeline.memory(0) == ((0, 0), *levels)
    assert taken(schedule, timeline.costs) == (2 * 0.5 * (1 + 1 / 32), 0.0), "two blocks, each a little larger"


def test_what_is_done_again_is_computing_and_not_useful():
    """R of half a stage's layers takes 1, where F takes 2 and B 4."""
    schedule = written(sequential(2), 1, "0F0 0R0 0B0", "1F0 1B0")
    timeline = timed(schedule, Costs(memory=MemoryShares(layer_input=0.0)), Decisions(recomputed=(0.5, 0.0)))
    assert timeline.ideal == (7 + 6) / 2
    assert timeline.bubble == pytest.approx(1 - 6.5 / 12)
    assert timeline.recomputed == pytest.approx(1 / 13)
    assert timeline.useful == pytest.approx(6 / 12)
    assert timeline.memory(0) == ((0, 0), (0, 0.5), (2, 1), (12, 0))
    assert (timeline.copying, timeline.copies) == (0, ())
