"""A vocabulary that all ranks share: where its collectives stand, what the checker refuses, and its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.schedules.planning.forward_only import forward_only
from megatron.schedules.planning.kinds import KINDS, At, Kind
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.placement import sequential, v_shape, zigzag
from megatron.schedules.planning.registry import plan
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import simulate
from megatron.schedules.runtime.check import check
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.runtime.meetings import Worker
from megatron.schedules.runtime.program import (
    COLLECTIVES,
    Action,
    Op,
    Program,
    ProgramError,
    Ranks,
    channels_of,
)
from megatron.schedules.runtime.transport import (
    GroupTransport,
    MessageSpec,
    make_channels,
    make_meeting_group,
)
from tests.planning.made_schedules import NAMED
from tests.ranks import outcomes_of, run_ranks
from tests.runtime.plain_stages import SHAPE
from tests.runtime.random_schedules import (
    forwards_of,
    random_schedule,
    shared_costs,
    shared_plan,
    shared_request,
)
from tests.runtime.shared_vocabulary import WORDS, Gather, SharingStages, without_sharing
from tests.runtime.test_device_sync import ends
from tests.runtime.thread_ranks import ThreadTalk, errors_in_threads, run_threads, transports

SIZES = ((2, 1), (2, 4), (3, 2), (3, 7), (4, 8), (8, 5))
ADAPTIVE = ((2, 1), (4, 6))


def lowered(schedule: Schedule) -> tuple[Program, ...]:
    programs = lower(schedule, shared_costs(4 * schedule.ranks).on(schedule.placement))
    check(programs)
    return programs


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


@pytest.mark.parametrize("name", [*NAMED, "adaptive"])
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
        assert program.completing[Op.ADD, first, microbatches[-1]] == 0
        assert {stage for _, stage, _ in program.completing} == reduced


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
        assert program.completing[adding[-1][:3]] == sum(a.op in KINDS for a in after) - 1
        assert len(program.completing) == 2
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


def each_meeting(programs: tuple[Program, ...]) -> Iterator[tuple[int, list[Action], list[int]]]:
    """Every rank, its actions, and where in them its collectives are."""
    for rank, program in enumerate(programs):
        actions = list(program.actions)
        yield rank, actions, [index for index, action in enumerate(actions) if action.op in COLLECTIVES]


@pytest.mark.parametrize("passes", [shared_plan("v-half", 2, 3), shared_plan("1f1b", 3, 2)], ids=lambda each: each.name)
def test_any_swap_any_loss_and_any_double_of_a_collective_is_refused(passes: Schedule):
    programs = lowered(passes)
    for rank, actions, where in each_meeting(programs):
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
    assert early == "rank 1: 1OUTPUT0 comes before 1F0, which makes this rank's part of it"
    assert refusal(by_hand("EMBED F SEND_F OUTPUT SUM S", second)) == (
        "rank 0: 0SUM0 comes before 0S0, which makes this rank's part of it"
    )
    assert refusal(by_hand("F EMBED SEND_F OUTPUT S SUM", second)) == (
        "rank 0: 0F0 needs what 0EMBED0 brings, which is not there"
    )
    assert refusal(by_hand("EMBED F SEND_F S OUTPUT SUM", second)) == (
        "rank 0: 0S0 needs what 0OUTPUT0 brings, which is not there"
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
        "rank 0 before 0F0 for collective 0, which rank 1 has not come to; "
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


# --- carried out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_nothing_hangs_whatever_waits_for_the_device(name: str):
    for d, n in ((2, 3), (4, 6)):
        passes = shared_plan(name, d, n)
        for schedule in (passes, forward_only(passes.placement, n, shared_costs(4 * d))):
            assert ends(lowered(schedule))


def carried_out(passes: Schedule) -> list[SharingStages]:
    """Every rank's stages after ``passes`` in threads, two for each rank."""
    programs, talk = lowered(passes), ThreadTalk(passes.ranks)
    stages = [
        SharingStages(program, lambda tensor, rank=program.rank: talk.gather(rank, tensor)) for program in programs
    ]
    run_threads(programs, lambda program, transport: run(program, stages[program.rank], transport))
    return stages


def check_all(passes: Schedule, found: list[tuple[list[Tensor], dict[int, Tensor]]]) -> None:
    """Gradients and losses of all ranks are those of the whole model on one process."""
    expected, size = without_sharing(passes), WORDS // passes.ranks
    for rank, (gradients, losses) in enumerate(found):
        own = slice(rank * size, (rank + 1) * size)
        stages = [g for stage in passes.placement.stages_of(rank) for g in expected.stages[stage]]
        torch.testing.assert_close(gradients, [expected.embedding[own], expected.output[own], *stages])
        if rank == passes.placement.rank_of[-1]:
            torch.testing.assert_close(losses, expected.losses)
        else:
            assert not losses


@pytest.mark.parametrize("name", [*NAMED, "adaptive"])
def test_gradients_are_those_of_one_process(name: str):
    for d, n in ((2, 3), (4, 5)):
        passes = shared_plan(name, d, n)
        stages = carried_out(passes)
        check_all(passes, [(each.gradients(), each.losses) for each in stages])  # type: ignore[misc]
        assert all(sorted(each.reduced) == sorted(each.modules) for each in stages)


def test_random_schedules_give_the_gradients_of_one_process():
    for seed in range(6):
        passes = random_schedule(seed, 2 + seed % 3, shared=True)
        check_all(passes, [(each.gradients(), each.losses) for each in carried_out(passes)])  # type: ignore[misc]


def test_forwards_alone_give_the_same_losses():
    passes = shared_plan("v-half", 3, 5)
    for schedule in (forwards_of(passes), forward_only(passes.placement, 5, shared_costs(12))):
        stages = carried_out(schedule)
        losses = stages[passes.placement.rank_of[-1]].losses
        torch.testing.assert_close(losses, without_sharing(passes).losses)
        assert all(each.gradients() for each in stages)


def test_two_schedules_give_equal_gradients_to_the_bit():
    """Wherever stages live, and in whatever order ranks do their parts: the sums over ranks are in one order."""
    found = []
    for name in ("interleaved-1f1b", "v-half", "v-zb"):
        passes = shared_plan(name, 4, 6)
        stages = carried_out(passes)
        ends = torch.stack([torch.cat([each.embedding_grad, each.output_grad]) for each in stages])
        layers = {
            stage: [p.grad for p in module.parameters()] for each in stages for stage, module in each.modules.items()
        }
        found.append((ends, [layers[stage] for stage in range(8)]))
    for ends_, layers_ in found[1:]:
        assert torch.equal(ends_, found[0][0])
        for own, others in zip(layers_, found[0][1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))


class BrokenError(Exception):
    """Raised on purpose."""


def _failing(stages: SharingStages, op: Op) -> None:
    meet = stages.meet

    def chain() -> None:
        raise BrokenError("on purpose")

    stages.meet = lambda each, m: chain if (each, m) == (op, 1) else meet(each, m)  # type: ignore[method-assign]


@pytest.mark.parametrize("op", list(COLLECTIVES))
def test_a_chain_that_raises_ends_its_rank_with_its_reason(op: Op):
    """At what is next waited for; where that does not come without this rank, at once."""
    passes = shared_plan("v-half", 2, 3)
    programs, talk = lowered(passes), ThreadTalk(2, patience=0.5)
    lines: list[str] = []
    made = transports(programs, 1, partial(Worker, 0.2, lines.append))

    def body(program: Program) -> None:
        stages = SharingStages(program, lambda tensor: talk.gather(program.rank, tensor))
        if program.rank == 1:
            _failing(stages, op)
        run(program, stages, made[program.rank])

    errors = errors_in_threads(programs, body)
    raised = [error for error in errors if isinstance(error, BrokenError)]
    assert all("on pipeline rank 1 of 2, at " in error.__notes__[0] for error in raised)
    assert raised or any("a collective of the pipeline failed: BrokenError('on purpose')" in line for line in lines)


# --- over gloo ----------------------------------------------------------------------------------------------------


def _gather_over(group: dist.ProcessGroup) -> Gather:
    def gather(tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor.contiguous(), group=group)
        return found

    return gather


def _gloo_body(schedules: list[Schedule]) -> list[tuple[list, dict]]:
    world = list(range(dist.get_world_size()))
    channels = make_channels([world], {each for schedule in schedules for each in channels_of(schedule.placement)})
    gather = _gather_over(make_meeting_group([world]))
    spec = MessageSpec(SHAPE, torch.float64, torch.device("cpu"))
    found = []
    for schedule in schedules:
        program = lowered(schedule)[dist.get_rank()]
        stages = SharingStages(program, gather)
        run(program, stages, GroupTransport(channels, spec))
        gradients = [g.numpy() for g in stages.gradients() if g is not None]
        found.append((gradients, {m: loss.numpy() for m, loss in stages.losses.items()}))
    return found


def test_processes_over_gloo_give_the_gradients_of_one():
    schedules = [shared_plan(name, 3, n) for name, n in (("v-half", 5), ("zb-1p", 2), ("interleaved-1f1b", 4))]
    found = run_ranks(3, _gloo_body, schedules)
    for index, schedule in enumerate(schedules):
        tensors = [
            ([torch.from_numpy(g) for g in rank[index][0]], {m: torch.from_numpy(x) for m, x in rank[index][1].items()})
            for rank in found
        ]
        check_all(schedule, tensors)


def _breaking_body(schedule: Schedule) -> None:
    world = list(range(dist.get_world_size()))
    channels = make_channels([world], channels_of(schedule.placement))
    program = lowered(schedule)[dist.get_rank()]
    stages = SharingStages(program, _gather_over(make_meeting_group([world])))
    if dist.get_rank() == 1:
        _failing(stages, Op.SUM)
    run(program, stages, GroupTransport(channels, MessageSpec(SHAPE, torch.float64, torch.device("cpu"))))


def test_a_chain_that_raises_ends_all_processes():
    outcomes = outcomes_of(2, _breaking_body, shared_plan("v-half", 2, 3), timeout=40)
    assert all(outcome.exit_code == 1 and outcome.error is not None for outcome in outcomes)
    assert "BrokenError: on purpose" in str(outcomes[1].error)
    assert all(outcome.seconds < 30 for outcome in outcomes)
