"""Transport of messages of any shape: schedules whose microbatches differ in size, and ends without hanging."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.runtime.check import check
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.runtime.program import Channel, Op, Program, ProgramError, channels_of, slot_filled, slot_needed
from megatron.schedules.runtime.transport import Channels, MessageSpec, make_channels
from megatron.schedules.runtime.variable_transport import VariableTransport
from tests.ranks import run_ranks
from tests.runtime.plain_stages import PlainStages, without_pipeline
from tests.runtime.random_schedules import forwards_of, random_schedule
from tests.runtime.strict_wires import StuckError, strict_channels
from tests.runtime.thread_ranks import errors_in_threads

CPU = torch.device("cpu")
SPEC = MessageSpec((0, 0), torch.float32, CPU)


def waits_out_of_order(program: Program) -> bool:
    """Whether passes use some channel's messages in another order than their receives are posted."""
    last, posted, used = program.placement.last_stage, {}, {}
    for action in program.actions:
        if action.op in (Op.RECV_F, Op.RECV_B):
            posted[slot_filled(action, last)] = action.peer, len(posted)
        elif action.peer is None and slot_needed(action, last) in posted:
            peer, number = posted[slot_needed(action, last)]
            if number < used.get(peer, number):
                return True
            used[peer] = number
    return False


def gloo_channels() -> tuple[Channels, Channels]:
    """Between all pairs of ranks: for tensors, for shapes."""
    world = list(range(dist.get_world_size()))
    pairs = [Channel(a, b) for a in world for b in world if a != b]
    return make_channels([world], pairs), make_channels([world], pairs, backend="gloo")


def _run_body(schedules: list[Schedule]) -> list[tuple[dict, dict]]:
    rank, channels = dist.get_rank(), gloo_channels()
    found = []
    for schedule in schedules:
        placement = schedule.placement
        stages = PlainStages(placement.stages_of(rank), placement.last_stage, varied=True)
        run(lower(schedule)[rank], stages, VariableTransport(*channels, SPEC))
        gradients = {s: [None if g is None else g.numpy() for g in gs] for s, gs in stages.gradients().items()}
        found.append((gradients, {m: loss.item() for m, loss in stages.losses.items()}))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_microbatches_that_differ_in_size_give_the_gradients_of_a_plain_run(ranks: int):
    names = ("1f1b", "interleaved-1f1b", "zb-1p", "v-min", "v-half", "v-zb")
    schedules = [random_schedule(seed, ranks) for seed in range(100 * ranks, 100 * ranks + 12)]
    schedules += [plan(Request(name, ranks, n)) for name in names for n in (1, 5)]
    assert any(waits_out_of_order(program) for schedule in schedules for program in lower(schedule))
    found = run_ranks(ranks, _run_body, schedules)
    for index, schedule in enumerate(schedules):
        expected, losses = without_pipeline(schedule, varied=True)
        seen: dict[int, float] = {}
        gradients: dict[int, Any] = {}
        for rank_found in found:
            gradients |= rank_found[index][0]
            seen |= rank_found[index][1]
        assert seen == {m: loss.item() for m, loss in losses.items()}
        assert gradients.keys() == expected.keys()
        for stage, grads in gradients.items():
            for gradient, reference in zip(grads, expected[stage], strict=True):
                assert torch.equal(torch.from_numpy(gradient), reference), f"{schedule.name} stage {stage}"


def _order_body() -> list[tuple[tuple[int, ...], float]]:
    """Each side posts all sends before it receives, and waits in a random order."""
    rank, got = dist.get_rank(), {}
    transport = VariableTransport(*gloo_channels(), SPEC)
    for k in range(8):
        transport.send(1 - rank, torch.full((k + 1, rank + 2), float(k)).t().contiguous().t())
    pending = [(k, transport.receive(1 - rank)) for k in range(8)]
    random.Random(rank).shuffle(pending)
    for k, message in pending:
        arrived = message.wait()
        assert (arrived == arrived[0, 0]).all()
        got[k] = tuple(arrived.shape), arrived[0, 0].item()
    transport.finish()
    return [got[k] for k in range(8)]


def test_shapes_and_contents_belong_together_whatever_is_waited_for_first():
    expected = [[((k + 1, width), float(k)) for k in range(8)] for width in (3, 2)]
    assert run_ranks(2, _order_body) == expected


def _refused_body() -> list[str]:
    transport, refused = VariableTransport(*gloo_channels(), SPEC), []
    for tensor in (torch.zeros(5), torch.zeros(5, 1, dtype=torch.float64)):
        with pytest.raises(ValueError) as caught:
            transport.send(1 - dist.get_rank(), tensor)
        refused.append(str(caught.value))
    return refused


def test_another_dtype_or_number_of_dimensions_is_refused():
    agreed = "a message of torch.float32 in 2 dimensions was agreed, not "
    assert run_ranks(2, _refused_body) == [[agreed + "torch.float32 (5,)", agreed + "torch.float64 (5, 1)"]] * 2


class MarkedStages:
    """Stages whose every message says whose it is, in its size and in its contents."""

    def __init__(self, last_stage: int) -> None:
        self._last_stage = last_stage

    def forward(self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool) -> Tensor | None:
        if stage:
            self._check(activation, stage - 1, microbatch)
        return None if stage == self._last_stage else self._mark(stage, microbatch)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if stage < self._last_stage:
            self._check(gradient, stage + 1, -1 - microbatch)
        return self._mark(stage, -1 - microbatch) if stage else None

    backward_input = backward

    def backward_weight(self, stage: int, microbatch: int) -> None: ...

    def reduce_gradients(self, stage: int) -> None: ...

    @staticmethod
    def _mark(stage: int, number: int) -> Tensor:
        return torch.full((stage + 1, number % 7 + 1), float(100 * stage + number))

    def _check(self, message: Tensor | None, stage: int, number: int) -> None:
        assert message is not None and torch.equal(message, self._mark(stage, number))


def ends(programs: Sequence[Program], *, queue: bool, patience: float) -> bool:
    """Whether ``programs``, a thread each, come to their end over wires that buffer nothing."""
    placement = programs[0].placement
    wires = [channels_of(placement), len(programs)]
    tensors = strict_channels(*wires, queue=queue, patience=patience)
    shapes = strict_channels(*wires, queue=False, patience=patience)

    def one(program: Program) -> None:
        transport = VariableTransport(tensors[program.rank], shapes[program.rank], SPEC)
        run(program, MarkedStages(placement.last_stage), transport)

    errors = errors_in_threads(programs, one)
    for error in errors:
        if not isinstance(error, StuckError):
            raise error
    return not errors


def _passes(programs: Sequence[Program], **model: bool) -> bool:
    try:
        check(programs, receives_at_use=True, **model)
    except ProgramError:
        return False
    return True


def test_nothing_hangs_where_nothing_is_buffered():
    for seed in range(80):
        programs = lower(random_schedule(seed))
        assert ends(programs, queue=False, patience=20), programs
        programs = lower(forwards_of(random_schedule(seed)))
        assert ends(programs, queue=False, patience=20), programs


def test_on_a_single_queue_what_hangs_is_what_the_checker_refuses():
    sound = stuck = 0
    for seed in range(100):
        programs = lower(random_schedule(seed, microbatches=4))
        if _passes(programs, single_queue=True):
            assert ends(programs, queue=True, patience=20), programs
            sound += 1
        elif stuck < 5:
            assert not ends(programs, queue=True, patience=0.3), programs
            stuck += 1
    assert sound > 20 and stuck == 5
    programs = lower(plan(Request("interleaved-1f1b", 2, 4)))
    check(programs, single_queue=True)  # sound where shapes are known
    assert not _passes(programs, single_queue=True)
    assert not ends(programs, queue=True, patience=0.3)
