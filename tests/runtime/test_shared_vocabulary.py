"""A vocabulary that all ranks share, carried out: nothing hangs, gradients are those of one process, errors end."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.planner.forward_only import forward_only
from megatron.schedules.programs.program import (
    COLLECTIVES,
    Op,
    Program,
    channels_of,
)
from megatron.schedules.runtime.collectives import Worker
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import (
    MessageSpec,
    Transport,
    make_channels,
    make_collective_group,
)
from megatron.schedules.schedule.schedule import Schedule
from tests.planner.made_schedules import NAMED
from tests.programs.random_schedules import (
    forwards_of,
    random_schedule,
    shared_costs,
    shared_plan,
)
from tests.ranks import outcomes_of, run_ranks
from tests.runtime.plain_stages import SHAPE
from tests.runtime.shared_vocabulary import WORDS, Gather, SharingStages, lowered, without_sharing
from tests.runtime.test_device_sync import ends
from tests.runtime.thread_ranks import ThreadTalk, errors_in_threads, run_threads, transports
from tests.waiting import HANGS_S

pytestmark = pytest.mark.job

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
    collective = stages.collective

    def chain() -> None:
        raise BrokenError("on purpose")

    stages.collective = lambda each, m: chain if (each, m) == (op, 1) else collective(each, m)  # type: ignore[method-assign]


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
    gather = _gather_over(make_collective_group([world]))
    spec = MessageSpec(SHAPE, torch.float64, torch.device("cpu"))
    found = []
    for schedule in schedules:
        program = lowered(schedule)[dist.get_rank()]
        stages = SharingStages(program, gather)
        run(program, stages, Transport(channels, spec))
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


def _breaking_body(schedule: Schedule, op: Op, patience: float) -> None:
    world = list(range(dist.get_world_size()))
    channels = make_channels([world], channels_of(schedule.placement))
    program = lowered(schedule)[dist.get_rank()]
    stages = SharingStages(program, _gather_over(make_collective_group([world])))
    if dist.get_rank() == 1:
        _failing(stages, op)
    spec = MessageSpec(SHAPE, torch.float64, torch.device("cpu"))
    run(program, stages, Transport(channels, spec, Worker(patience)))


@pytest.mark.parametrize(("op", "patience"), [(Op.EMBED, 0.5), (Op.SUM, 10 * HANGS_S)])
def test_a_chain_that_raises_ends_all_processes(op: Op, patience: float):
    """Even of a rank that waits for a message which cannot come without it: its words are looked up nowhere."""
    outcomes = outcomes_of(2, _breaking_body, shared_plan("v-half", 2, 3), op, patience)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    if op is Op.SUM:
        assert "BrokenError: on purpose" in str(outcomes[1].error)
