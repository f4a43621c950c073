"""Weight gradients behind messages of experts: what is hidden, what is left, and that no work is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.hidden_messages import hide, pieces
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import MicrobatchLoads
from megatron.schedules.search.list_scheduling import set_left
from megatron.schedules.search.tasks import tasks_of
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import costed_schedules, examples, timed, written
from tests.tiers import by_night

# Half of F, I and W each; messages of a quarter in each F and I.
COSTS = Costs(LayerTimes(1.0, 1.0, 1.0, (0.5, 0.5)))


def left(row: str, costs: Costs = COSTS) -> str:
    """What is left of each pass of a one-chunk rank, twice the costs."""
    schedule = written(sequential(2), 3, row, "")
    return " ".join(f"{time:g}" for time in hide(schedule.order[0], costs.on(schedule.placement)).durations)


def test_a_due_weight_gradient_runs_behind_the_messages_that_follow():
    assert left("0F0 0I0 0F1 0W0 0I1 0W1 0F2 0I2 0W2") == "2 2 2 1 2 2 2 2 2"
    assert left("0F0 0I0 0F1 0I1 0W0 0F2 0W1 0I2 0W2") == "2 2 2 2 0 2 1 2 2", "two messages hide it"


def test_nothing_runs_behind_the_messages_of_its_own_input_gradient():
    assert left("0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2") == "2 2 2 2 2 2 2 2 2"


def test_weight_gradients_run_in_the_order_of_their_passes():
    """With 0W1 first, 0W0 waits for it although its own I has ended."""
    assert left("0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2") == "2 2 2 2 2 0 2 2 2"
    assert left("0F0 0F1 0I0 0F2 0I1 0W1 0W0 0I2 0W2") == "2 2 2 2 2 2 2 2 2"


def test_the_last_weight_gradient_of_a_stage_stays_and_so_do_those_after_it():
    assert left("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2") == "2 2 2 2 2 2 2 2 2"
    schedule = written(v_shape(1), 1, "0F0 1F0 1I0 0I0 1W0 0W0")
    assert hide(schedule.order[0], COSTS.on(schedule.placement)).durations == [1] * 6


def test_a_whole_backward_hides_nothing_and_later_ones_wait_for_it():
    assert left("0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2") == "2 2 2 2 4 2 2 2"


def test_figures_tell_hidden_from_exposed_time_on_each_rank():
    schedule = written(sequential(2), 2, "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1B0 1F1 1B1")
    timeline = timed(schedule, COSTS)
    assert (timeline.hidden, timeline.exposed) == ((1.0, 0.0), (3.0, 4.0))


@pytest.mark.parametrize("messages", [(-0.1, 0.0), (1.01, 0.0), (0.0, 2.5), (float("nan"), 0.0), (0.0, float("inf"))])
def test_messages_are_a_part_of_their_pass(messages: tuple[float, float]):
    with pytest.raises(PlanError, match="messages of experts must take from 0 to"):
        Costs(LayerTimes(1.0, 2.0, 1.0, messages))


def test_recompute_sends_the_messages_of_a_forward_again():
    on_stages = Costs(LayerTimes(1, 1, 1, (0.25, 0.5))).on(sequential(2), Decisions(recomputed=(1.0, 0.5)))
    assert on_stages.messages == {Kind.F: (0.5, 0.5), Kind.I: (1.0, 1.0), Kind.R: (0.5, 0.25)}
    stock = Costs(LayerTimes(1, 1, 1, (0.25, 0.5), stock_recompute=1.0)).on(sequential(2))
    assert stock.messages[Kind.I] == (1.5, 1.5)


def test_messages_grow_with_the_tokens_of_a_microbatch():
    schedule = written(sequential(2), 2, "0F0 0F1", "")
    on_stages = replace(COSTS.on(schedule.placement), loads=MicrobatchLoads((1.0, 3.0), (1.0, 9.0)))
    assert on_stages.messages_of(schedule.order[0]) == [1.0, 3.0]


@examples(150)
@given(costed_schedules())
def test_work_is_conserved_and_no_message_hides_more_than_its_time(made: tuple[Schedule, Costs]):
    schedule, costs = made
    on_stages = costs.on(schedule.placement)
    for row in schedule.order:
        hiding, whole, messages = hide(row, on_stages), on_stages.durations_of(row), on_stages.messages_of(row)
        assert sum(hiding.durations) + sum(hiding.hidden) == pytest.approx(sum(whole))
        assert all(0 <= hidden <= most + 1e-9 for hidden, most in zip(hiding.hidden, messages, strict=True))
        assert all(0 <= time <= most for time, most in zip(hiding.durations, whole, strict=True))
        for behind, of, _ in pieces(row, on_stages):
            assert row[of].kind is Kind.W and behind < of
            assert row.index(row[of]._replace(kind=Kind.I)) < behind


@examples(100)
@given(costed_schedules(), st.sampled_from((1e-6, 3.0, 1e9)))
def test_hiding_never_makes_an_order_longer_and_does_not_depend_on_the_unit(
    made: tuple[Schedule, Costs], factor: float
):
    schedule, costs = made
    hidden, exposed = timed(schedule, costs), timed(schedule, costs.without_messages)
    assert hidden.makespan <= exposed.makespan + 1e-9
    scaled = costs.scaled(lambda time: factor * time)
    assert timed(schedule, scaled).makespan == pytest.approx(factor * hidden.makespan)
    assert timed(schedule, scaled).hidden == pytest.approx([factor * each for each in hidden.hidden], abs=1e-9 * factor)
    assert costs.around_one().layers.messages == pytest.approx(scaled.around_one().layers.messages)


@examples(100)
@given(costed_schedules())
def test_the_search_takes_the_same_time_from_each_weight_gradient(made: tuple[Schedule, Costs]):
    schedule, costs = made
    assume(Kind.B not in schedule.kinds)  # the search splits every backward
    on_stages = costs.on(schedule.placement)
    tasks, passes = tasks_of(schedule, on_stages)
    durations, due = [0.0] * len(passes), [0] * len(passes)
    set_left(tasks.both.forward, range(len(passes)), True, durations, due)
    assert durations == [time for row in schedule.order for time in hide(row, on_stages).durations]


@pytest.mark.parametrize("name", ["zb-1p", by_night("zb-2p"), by_night("v-min"), "v-half", by_night("v-zb")])
def test_named_schedules_hide_messages_within_their_memory(name: str):
    exposed, costs = (
        Costs(LayerTimes(1.3, 1.4, 0.75), link=Link(0.05), memory=MemoryShares(0.6)),
        Costs(LayerTimes(1.3, 1.4, 0.75, (0.3, 0.3)), link=Link(0.05), memory=MemoryShares(0.6)),
    )
    before = timed(plan(Request(name, 8, 32, exposed)), exposed)
    after = timed(plan(Request(name, 8, 32, costs)), costs)
    assert after.makespan <= before.makespan + 1e-9
    assert after.peak <= before.peak + 1e-9
    assert sum(after.hidden) > 0


def test_without_messages_nothing_changes():
    costs = Costs.of(1.3, 1.4, 0.75, 0.05)
    timeline = simulate(plan(Request("v-half", 4, 8, costs)), costs.on(v_shape(4)))
    assert timeline.hidden == timeline.exposed == (0.0,) * 4
