"""Reordering: never longer, never above the memory allowed, always a schedule, and the choices its policy states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search import rounds
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.polish import improve
from megatron.schedules.search.rounds import Rounds
from megatron.schedules.search.tasks import Links, Tasks, flags, fractions, tasks_of, whole
from tests.planner.made_schedules import costed_schedules, examples, timed, written

POLICIES = st.builds(
    Policy,
    lookahead=st.integers(1, 20),
    defer_fillers=st.booleans(),
    patience=st.sampled_from((0.0, 0.3, 0.5, 1.0)),
)
LIMITS = st.sampled_from((0.0, 1.0, 2.0, 100.0))


def own_limits(schedule: Schedule, costs: Costs, limit: float) -> list[float]:
    """What reordering may use: the limit, or what the order already holds where that is more."""
    return [max(limit, own) for own in peaks(schedule, costs.on(schedule.placement))]


USUAL = Policy(16, defer_fillers=True)
python = partial(Rounds, compiled=False)


def rescheduled(
    made: tuple[Schedule, Costs], policy: Policy, limits: list[float], *, backward: bool = False
) -> tuple[Schedule, float]:
    """The schedule that a round in one direction of time makes, and the makespan stated with it."""
    schedule, costs = made
    tasks, passes = tasks_of(schedule, costs.on(schedule.placement))
    order = list(range(len(passes)))
    if backward:
        order, reached, _ = python(tasks.reversed()).settled(tasks.reversed_order(order), limits, policy)
        order = tasks.reversed_order(order)
    else:
        order, reached, _ = python(tasks).settled(order, limits, policy)
    return replace(schedule, order=tasks.rows(order, passes)), reached


@examples(200)
@given(costed_schedules(), st.lists(POLICIES, min_size=1, max_size=3), LIMITS, st.integers(0, 9))
def test_an_improved_order_is_never_longer_and_keeps_its_limits(
    made: tuple[Schedule, Costs], policies: list[Policy], limit: float, rounds: int
):
    schedule, costs = made
    on_stages, allowed = costs.on(schedule.placement), own_limits(schedule, costs, limit)
    better = improve(schedule, on_stages, [limit] * schedule.ranks, policies, rounds)
    validate(better)
    assert [sorted(row) for row in better.order] == [sorted(row) for row in schedule.order]
    assert timed(better, costs).makespan <= timed(schedule, costs).makespan + 1e-9
    assert all(held <= most + 1e-9 for held, most in zip(peaks(better, on_stages), allowed, strict=True))
    assert improve(schedule, on_stages, [limit] * schedule.ranks, policies, rounds) == better, "the same every time"
    if not rounds:
        assert better == schedule


@examples(150)
@given(costed_schedules(), POLICIES, LIMITS)
def test_scheduled_in_either_direction_an_order_stays_sound(made: tuple[Schedule, Costs], policy: Policy, limit: float):
    if {Kind.B, Kind.W} <= made[0].kinds:  # list scheduling does not know that a B stops what runs behind messages
        made = without_messages(made)
    limits = own_limits(*made, limit)
    for backward in (False, True):
        schedule, stated = rescheduled(made, policy, limits, backward=backward)
        validate(schedule)
        timeline = timed(schedule, made[1])
        assert timeline.makespan <= stated + 1e-9
        assert all(own <= most + 1e-9 for own, most in zip(timeline.peaks, limits, strict=True))


def without_messages(made: tuple[Schedule, Costs]) -> tuple[Schedule, Costs]:
    """The same without messages of experts, which put the W passes of a rank in the order of their I passes."""
    schedule, costs = made
    return schedule, costs.without_messages


@examples(100)
@given(costed_schedules())
def test_looking_at_one_pass_only_changes_nothing(made: tuple[Schedule, Costs]):
    """Then each rank does its passes in order, as the simulator has it."""
    made = without_messages(made)
    schedule, reached = rescheduled(made, Policy(lookahead=1), own_limits(*made, 0))
    assert schedule == made[0]
    assert reached == pytest.approx(timed(*made).makespan)


@examples(100)
@given(costed_schedules(), POLICIES, LIMITS)
def test_what_stands_before_the_last_forward_can_be_kept_in_order(
    made: tuple[Schedule, Costs], policy: Policy, limit: float
):
    """Backward in time passes of the cool-down may come to stand between them, forward not even that."""
    made = without_messages(made)
    limits, policy = own_limits(*made, limit), policy._replace(ends_only=True)
    forward, _ = rescheduled(made, policy, limits)
    backward, _ = rescheduled(made, policy, limits, backward=True)
    for rank, row in enumerate(made[0].order):
        steady = row[: max(place for place, work in enumerate(row) if work.kind is Kind.F)]
        assert forward.order[rank][: len(steady)] == steady
        assert tuple(work for work in backward.order[rank] if work in steady) == steady


def test_an_order_improved_by_compiled_rounds_is_the_same(monkeypatch: pytest.MonkeyPatch):
    request = Request("v-half", 8, 20, Costs.of(1, 1.1, 0.75, 0.05))
    interpreted = plan(request)
    monkeypatch.setattr(rounds, "_LOADING", 0)
    monkeypatch.setattr(rounds, "_COMPILING", 0)
    assert plan(request) == interpreted


@examples(50)
@given(costed_schedules())
def test_time_turned_round_twice_is_time(made: tuple[Schedule, Costs]):
    schedule, costs = without_messages(made)
    tasks, passes = tasks_of(schedule, costs.on(schedule.placement))
    assert tasks.reversed().reversed() == tasks
    order = range(len(passes))
    assert list(tasks.reversed_order(tasks.reversed_order(order))) == list(order)
    assert tasks.rows(order, passes) == schedule.order
    assert sorted(passes) == sorted(work for _, work in schedule.passes())


# --- what a limit and a policy mean -------------------------------------------------------------------------------


def test_memory_is_what_lets_ranks_work_at_once():
    """One microbatch after the other: within one nothing can be gained, within two the ranks overlap."""
    base = written(sequential(2), 3, "0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    on_stages = Costs().on(base.placement)
    alone = timed(base).makespan
    assert alone == 3 * (2 + 2 + 4 + 4)
    kept = improve(base, on_stages, [1, 1], [USUAL], 9)
    assert timed(kept).makespan == alone
    overlapping = improve(base, on_stages, [2, 1], [USUAL], 9)
    assert timed(overlapping).makespan == (3 + 2 - 1) * 6, "1F1B's length, the best there is for whole backwards"
    assert timed(overlapping).peaks == (2, 1)


def second_row(
    policy: Policy,
    order: str,
    length: dict[str, float],
    after: dict[str, str],
    change: dict[str, float] | None = None,
    limit: float = 9,
) -> str:
    """Rank 0 does "a" alone; how rank 1 orders ``order``. Capitals are fillers; ``after``: what waits for what."""
    names = ["a", *order]
    awaited = [name for name in names if name in after]
    before = Links(
        start=whole(accumulate((name in after for name in names), initial=0)),
        task=whole(names.index(after[name]) for name in awaited),
        delay=fractions(0.0 for _ in awaited),
    )
    tasks = Tasks(
        first=whole([0, 1, len(names)]),
        rank=whole([0, *(1 for _ in order)]),
        duration=fractions(length.get(name, 1.0) for name in names),
        change=fractions((change or {}).get(name, 0.0) for name in names),
        filler=flags(name.isupper() for name in names),
        steady=flags(False for _ in names),
        channel=whole(-1 for _ in names),
        copying=fractions(0.0 for _ in names),
        opens=flags(False for _ in names),
        returns=whole(-1 for _ in names),
        before=before,
        after=before.turned(),
    )
    order_found, _, _ = python(tasks).settled(range(len(names)), [limit, limit], policy)
    return "".join(names[task] for task in order_found[1:])


@pytest.mark.parametrize(("patience", "expected"), [(0.0, "bc"), (0.2, "bc"), (0.25, "cb"), (1.0, "cb")])
def test_patience_is_the_delay_borne_as_a_share_of_the_pass_done_meanwhile(patience: float, expected: str):
    """b comes in at 3; c, four long and ready at once, would hold it up by 1."""
    assert second_row(USUAL._replace(patience=patience), "bc", {"a": 3, "c": 4}, {"b": "a"}) == expected


def test_a_pass_that_ends_in_time_is_done_whatever_the_patience():
    assert second_row(USUAL._replace(patience=0.0), "bc", {"a": 3, "c": 3}, {"b": "a"}) == "cb"


@pytest.mark.parametrize(("defer", "expected"), [(False, "Bc"), (True, "cB")])
def test_a_weight_gradient_gives_way_only_where_it_is_to_be_deferred(defer: bool, expected: str):
    assert second_row(USUAL._replace(defer_fillers=defer), "Bc", {}, {}) == expected


def test_a_deferred_weight_gradient_still_fills_what_would_be_idle():
    assert second_row(USUAL, "Bc", {"a": 3}, {"c": "a"}) == "Bc"


@pytest.mark.parametrize(("limit", "expected"), [(1, "bdce"), (2, "cebd")])
def test_nothing_overtakes_into_memory_that_is_needed_first(limit: float, expected: str):
    """b, which comes in late, and c take one each, d and e give it back: c goes ahead only where both fit."""
    change = {"b": 1.0, "d": -1.0, "c": 1.0, "e": -1.0}
    assert second_row(USUAL, "bdce", {"a": 3}, {"b": "a", "d": "b", "e": "c"}, change, limit) == expected


@pytest.mark.parametrize(("lookahead", "expected"), [(2, "bcd"), (3, "dbc")])
def test_no_pass_beyond_the_lookahead_is_seen(lookahead: int, expected: str):
    assert second_row(USUAL._replace(lookahead=lookahead), "bcd", {"a": 3}, {"b": "a", "c": "a"}) == expected
