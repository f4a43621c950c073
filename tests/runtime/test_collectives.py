"""Collectives of all ranks: where they stand in programs, and which programs the checker refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.planner.forward_only import forward_only
from megatron.schedules.planner.registry import plan
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import (
    COLLECTIVES,
    Action,
    Op,
    Program,
    ProgramError,
    Ranks,
)
from megatron.schedules.schedule.kinds import KINDS, At, Kind, Pass
from megatron.schedules.schedule.placement import sequential, v_shape, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from tests.planner.made_schedules import NAMED
from tests.programs.random_schedules import (
    forwards_of,
    random_schedule,
    shared_costs,
    shared_plan,
    shared_request,
)
from tests.runtime.shared_vocabulary import lowered
from tests.tiers import of_which_by_day

SIZES = ((2, 1), (2, 4), (3, 2), (3, 7), (4, 8), (8, 5))
ADAPTIVE = ((2, 1), (4, 6))


# --- where they stand ---------------------------------------------------------------------------------------------


def test_the_table_of_collectives_says_what_kinds_need():
    """What needs the last stage, or every rank, and is made there, comes by one of them."""
    by_kinds = {
        (need.kinds, kind, need.at)
        for kind, row in KINDS.items()
        for need in row.needs
        if need.at in (At.LAST, At.EVERY_RANK)
    }
    where = {At.LAST: (Ranks.LAST, Ranks.EVERY), At.EVERY_RANK: (Ranks.EVERY, Ranks.LAST)}
    found = {
        (each.made_by, user, at)
        for each in COLLECTIVES.values()
        for user in each.used_by
        for at, ranks in where.items()
        if each.made_by and ranks == (each.makers, each.users)
    }
    assert found == by_kinds
    # The ends of the model's first stage are no kinds' business.
    assert set(COLLECTIVES) - {op for op, each in COLLECTIVES.items() if each.chunk == -1} == {Op.EMBED, Op.EMBED_BACK}


def test_two_ranks_and_a_microbatch():
    """Each posts a collective right after what made it, or before its first pass that is later in the line."""
    rows = (("0F0", "0S0", "0I0", "0W0", "0T0"), ("1F0", "1S0", "1I0", "1W0", "1T0"))
    passes = Schedule("by hand", sequential(2), 1, tuple(tuple(map(Pass.parse, row)) for row in rows))
    assert [str(program) for program in lowered(passes)] == [
        "rank 0: 0EMBED0 0F0 0SEND_F0 0OUTPUT0 0S0 0SUM0 0RECV_B0 0WEIGH0 0I0 0EMBED_BACK0 0W0 0T0 0ADD0 0REDUCE0",
        "rank 1: 1EMBED0 1RECV_F0 1F0 1OUTPUT0 1S0 1SUM0 1I0 1SEND_B0 1WEIGH0 1W0 1T0 1EMBED_BACK0 1ADD0 1REDUCE0",
    ]


@pytest.mark.parametrize("name", of_which_by_day([*NAMED, "adaptive"], "zb-1p", "v-half", "adaptive"))
def test_every_plan_and_its_forwards_are_lowered_and_proved(name: str):
    for d, n in ADAPTIVE if name == "adaptive" else SIZES:
        passes = shared_plan(name, d, n)
        for schedule in (passes, forward_only(passes.placement, n, shared_costs(4 * d))):
            check(lower(schedule))
            check_collectives(schedule, lowered(schedule))


def test_four_chunks_a_rank_and_zigzags():
    for chunks in (3, 4):
        for n in (1, 6):
            check_collectives(passes := forward_only(zigzag(3, chunks), n, shared_costs(4 * 3)), lowered(passes))
    passes = plan(replace(shared_request("adaptive", 2, 4), chunk_choices=(4,)))
    check_collectives(passes, lowered(passes))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), forwards=st.booleans())
def test_any_valid_schedule(seed: int, forwards: bool):
    passes = random_schedule(seed, shared=True)
    passes = forwards_of(passes) if forwards else passes
    check_collectives(passes, lowered(passes))


def check_collectives(passes: Schedule, programs: tuple[Program, ...]) -> None:
    """Once for each microbatch, in one order on all ranks, each after every pass planned to end before its own."""
    training = Kind.T in passes.kinds
    expected = list(COLLECTIVES) if training else [Op.EMBED, Op.OUTPUT, Op.SUM]
    orders = [[action[::2] for action in each.actions if action.op in COLLECTIVES] for each in programs]
    assert all(order == orders[0] for order in orders)
    assert Counter(orders[0]) == {(op, m): 1 for op in expected for m in range(passes.microbatches)}
    costs = shared_costs(4 * passes.ranks).on(passes.placement)
    timeline = simulate(passes, costs)
    end = {
        work: at
        for row, ends in zip(passes.order, timeline.end, strict=True)
        for work, at in zip(row, ends, strict=True)
    }
    made = {
        (op, m): max(
            at
            for (stage, kind, number), at in end.items()
            if (number, kind in made_by) == (m, True) and makers.include(stage, passes.placement.last_stage)
        )
        for op, (_, made_by, makers, _, _) in COLLECTIVES.items()
        if made_by and op in expected
        for m in range(passes.microbatches)
    }
    for program in programs:
        assert [str(a) for a in program.actions if a.op in KINDS] == [str(work) for work in passes.order[program.rank]]
        check_gradients_are_added(passes, program, training=training)
        ended, waiting = 0.0, 0.0
        for op, stage, m, _ in program.actions:
            if op in KINDS:
                ended = end[Pass(stage, Kind(op), m)]
                assert waiting <= ended
            elif (op, m) in made:
                assert ended <= made[op, m]  # type: ignore[index]
                waiting = made[op, m]  # type: ignore[index]
        if program.rank == passes.placement.rank_of[0]:
            check_words_are_ahead(program)


def check_gradients_are_added(passes: Schedule, program: Program, *, training: bool) -> None:
    """Of each microbatch before the next one's are asked for, of the last at the end; then the stage is complete."""
    first = passes.placement.stages_of(program.rank)[0]
    backs = [a for a in program.actions if a.op in (Op.ADD, Op.EMBED_BACK)]
    microbatches = [a.microbatch for a in backs if a.op is Op.ADD]
    assert [(a.op, a.microbatch) for a in backs] == [(op, m) for m in microbatches for op in (Op.EMBED_BACK, Op.ADD)]
    assert len(microbatches) == (passes.microbatches if training else 0)
    for before, after in pairwise(program.actions):
        if before.op is Op.ADD:
            assert after.op in (Op.EMBED_BACK, Op.REDUCE)
    if training:
        assert [str(a) for a in program.actions[-2:]] == [
            f"{first}ADD{microbatches[-1]}",
            f"{first}REDUCE{microbatches[-1]}",
        ]
        reduced = {a.stage for a in program.actions if a.op is Op.REDUCE}
        assert reduced == set(passes.placement.stages_of(program.rank))
        assert completing(program)[Op.ADD, first, microbatches[-1]] == 0
        assert {stage for _, stage, _ in completing(program)} == reduced


def completing(program: Program) -> dict[tuple[Kind | Op, int, int], int]:
    """What completes a stage's gradients, by kind, stage and microbatch, and how many passes follow it."""
    return {key: ending.passes_left for key, ending in program.endings.items() if not ending.later}


def check_words_are_ahead(program: Program) -> None:
    """One pass of the rank is between, where there is one."""
    passes = 0
    posted: dict[int, int] = {}
    for op, stage, m, _ in program.actions:
        if op is Op.EMBED:
            posted[m] = passes
        passes += op in KINDS
        if (op, stage) == (Kind.F, 0):
            assert passes - 1 - posted[m] == min(1, passes - 1)


def test_programs_say_what_completes_gradients_and_what_is_held():
    """On a V of two ranks the last stage's gradients are complete after T or W, the first's after the last ADD."""
    for program in lowered(shared_plan("v-half", 2, 4)):
        last = program.placement.stages_of(program.rank)[-1]
        adding = [a for a in program.actions if a.stage == last and a.op in (Kind.W, Kind.B, Kind.T)]
        after = program.actions[program.actions.index(adding[-1]) :]
        assert completing(program)[adding[-1][:3]] == sum(a.op in KINDS for a in after) - 1
        assert len(completing(program)) == 2
        assert program.messages_held >= 2


# --- what is refused ----------------------------------------------------------------------------------------------


def changed(programs: tuple[Program, ...], rank: int, actions: list[Action]) -> list[Program]:
    found = list(programs)
    found[rank] = replace(programs[rank], actions=tuple(actions))
    return found


def refusal(programs: list[Program]) -> str:
    with pytest.raises(ProgramError) as caught:
        check(programs)
    return str(caught.value)


def collectives_of_ranks(programs: tuple[Program, ...]) -> Iterator[tuple[int, list[Action], list[int]]]:
    """Every rank, its actions, and where in them its collectives are."""
    for rank, program in enumerate(programs):
        actions = list(program.actions)
        yield rank, actions, [index for index, action in enumerate(actions) if action.op in COLLECTIVES]


@pytest.mark.parametrize("passes", [shared_plan("v-half", 2, 3), shared_plan("1f1b", 3, 2)], ids=lambda each: each.name)
def test_any_swap_any_loss_and_any_double_of_a_collective_is_refused(passes: Schedule):
    programs = lowered(passes)
    for rank, actions, where in collectives_of_ranks(programs):
        for i, j in pairwise(where):
            swapped = list(actions)
            swapped[i], swapped[j] = actions[j], actions[i]
            assert refusal(changed(programs, rank, swapped))
        for i in where:
            assert refusal(changed(programs, rank, actions[:i] + actions[i + 1 :]))
            assert refusal(changed(programs, rank, actions[: i + 1] + actions[i:]))


@pytest.mark.parametrize("kind", [Op.EMBED, Op.OUTPUT, Op.SUM, Op.WEIGH, Op.EMBED_BACK])
def test_no_collective_is_there_for_some_microbatches_only(kind: Op):
    programs = lowered(shared_plan("zb-1p", 2, 3))
    lacking = [replace(p, actions=tuple(a for a in p.actions if a[::2] != (kind, 1))) for p in programs]
    assert refusal(lacking)
    none = [replace(p, actions=tuple(a for a in p.actions if a.op is not kind)) for p in programs]
    assert refusal(none)


def by_hand(*rows: str) -> list[Program]:
    """Programs of one microbatch and stage a rank, written as a line of ops each."""
    found = []
    for rank, row in enumerate(rows):
        actions = []
        for op in row.split():
            peer = 1 - rank if op in ("SEND_F", "RECV_F", "SEND_B", "RECV_B") else None
            actions.append(Action(Kind(op) if op in KINDS else Op(op), rank, 0, peer))
        found.append(Program(rank, tuple(actions), sequential(len(rows)), 1))
    return found


def test_what_is_wrong_is_named():
    first = "EMBED F SEND_F OUTPUT S SUM"
    second = "EMBED RECV_F F OUTPUT S SUM"
    check(by_hand(first, second))
    early = refusal(by_hand(first, "EMBED RECV_F OUTPUT F S SUM"))
    assert early == "rank 1: 1OUTPUT0 comes before 1F0, which computes this rank's part of it"
    assert refusal(by_hand("EMBED F SEND_F OUTPUT SUM S", second)) == (
        "rank 0: 0SUM0 comes before 0S0, which computes this rank's part of it"
    )
    assert refusal(by_hand("F EMBED SEND_F OUTPUT S SUM", second)) == (
        "rank 0: 0F0 needs the result of 0EMBED0, which is not there"
    )
    assert refusal(by_hand("EMBED F SEND_F S OUTPUT SUM", second)) == (
        "rank 0: 0S0 needs the result of 0OUTPUT0, which is not there"
    )
    assert refusal(by_hand(first, "RECV_F F OUTPUT EMBED S SUM")) == (
        "collective 0: rank 0 posts 0EMBED0 and rank 1 posts 1OUTPUT0"
    )
    assert (
        refusal(by_hand(first, "EMBED RECV_F F OUTPUT S")) == "collective 2: rank 0 posts 0SUM0 and rank 1 posts none"
    )
    assert refusal(by_hand("EMBED F SEND_F OUTPUT S", "EMBED RECV_F F OUTPUT S")) == (
        "SUM of microbatch 0 is there 0 times instead of once"
    )
    programs = lowered(forward_only(v_shape(2), 1, shared_costs(8)))
    embed, *rest = programs[1].actions
    assert refusal(changed(programs, 1, [embed._replace(stage=2), *rest])) == (
        "rank 1: 2EMBED0 is written with stage 2 instead of 1"
    )


def test_ranks_that_wait_for_each_other_at_a_collective():
    """Rank 0 posts the first collective only after its message is through, rank 1 before it takes it."""
    first, second = by_hand("EMBED F SEND_F OUTPUT S SUM", "RECV_F EMBED F OUTPUT S SUM")
    assert refusal([first, second]) == (
        "ranks wait for each other: "
        "rank 0 before 0F0 for collective 0, which rank 1 has not joined; "
        "rank 1 before 1EMBED0 for message 0 of channel 0->1"
    )


def test_gradients_are_not_added_to_after_their_reduction():
    programs = lowered(shared_plan("1f1b", 2, 2))
    actions = list(programs[0].actions)
    *rest, add, reduce = actions
    assert refusal(changed(programs, 0, [*rest, reduce, add])) == (
        f"rank 0: {add} comes after {reduce}, which has reduced its gradients"
    )
    last_t = max(i for i, action in enumerate(actions) if action.op is Kind.T)
    early = [*actions[:last_t], reduce, *actions[last_t:-1]]
    assert "comes after" in refusal(changed(programs, 0, early))
