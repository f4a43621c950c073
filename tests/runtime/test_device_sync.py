"""Whatever waits for its whole device, wherever and however often, waits for something that comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.planner.service import make_plan
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Op, Program, ProgramError, channels_of
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import MessageSpec, Transport
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from tests.planner.made_schedules import NAMED, REAL
from tests.programs.random_schedules import forwards_of, random_schedule
from tests.runtime.strict_wires import (
    Collectives,
    Device,
    Rendezvous,
    StrictRunner,
    StuckError,
    Waiting,
    strict_channels,
)
from tests.runtime.thread_ranks import errors_in_threads
from tests.tiers import of_which_by_day

SPEC = MessageSpec((1, 1), torch.float32, torch.device("cpu"))


class MarkedStages:
    """Stages whose every message says whose it is, in its contents and, where it may, in its size.

    What a collective brings says which it is; stages that have met for their words need it.
    """

    def __init__(self, last_stage: int, *, varied: bool) -> None:
        self._last_stage, self._varied = last_stage, varied
        self._shared = False

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        if stage:
            self._check(activation, stage - 1, microbatch)
        elif self._shared:
            self._check_brought(activation, Op.EMBED, microbatch)
        return None if stage == self._last_stage else self._mark(stage, microbatch)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if stage < self._last_stage:
            self._check(gradient, stage + 1, -1 - microbatch)
        elif self._shared:
            self._check_brought(gradient, Op.SUM, microbatch)
        return self._mark(stage, -1 - microbatch) if stage else None

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        self._check_brought(hidden, Op.OUTPUT, microbatch)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        self._check_brought(weights, Op.WEIGH, microbatch)

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        self._check_brought(gradient, Op.EMBED_BACK, microbatch)

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor]:
        self._shared = True
        return lambda: _brought(op, microbatch)

    def _check_brought(self, tensor: Tensor | None, op: Op, microbatch: int) -> None:
        assert tensor is not None and torch.equal(tensor, _brought(op, microbatch))

    backward_input = backward

    def backward_weight(self, stage: int, microbatch: int) -> None: ...

    def recompute_forward(self, stage: int, microbatch: int) -> None: ...

    def reduce_gradients(self, stage: int) -> None: ...

    def _mark(self, stage: int, number: int) -> Tensor:
        shape = (stage + 1, number % 7 + 1) if self._varied else (1, 1)
        return torch.full(shape, float(100 * stage + number))

    def _check(self, message: Tensor | None, stage: int, number: int) -> None:
        assert message is not None and torch.equal(message, self._mark(stage, number))


def _brought(op: Op, microbatch: int) -> Tensor:
    return torch.tensor([list(Op).index(op), microbatch])


def ends(
    programs: Sequence[Program], *, waits: bool = True, varied: bool = False, replicas: int = 1, patience: float = 20
) -> bool:
    """Whether ``programs``, a thread for each rank of each replica, come to their end."""
    placement = programs[0].placement
    reductions = {stage: Rendezvous(replicas, patience) for stage in range(placement.stages)}
    ranks: dict[int, tuple[Program, Waiting, Transport]] = {}
    for replica in range(replicas):
        devices = [Device(waits=waits) for _ in programs]
        tensors = strict_channels(channels_of(placement), devices, patience)
        all_ranks = Collectives(len(programs), patience)
        shapes = strict_channels(channels_of(placement), [Device(waits=False) for _ in programs], patience)
        for rank, program in enumerate(programs):
            stages = Waiting(MarkedStages(placement.last_stage, varied=varied), devices[rank], reductions)
            fixed = Transport(tensors[rank], SPEC, StrictRunner(all_ranks, devices[rank]))
            transport = Transport(tensors[rank], SPEC, shapes=shapes[rank]) if varied else fixed
            ranks[replica * len(programs) + rank] = program, stages, transport

    errors = errors_in_threads(list(ranks), lambda number: run(*ranks[number]))
    for error in errors:
        if not isinstance(error, StuckError):
            raise error
    return not errors


@pytest.mark.parametrize("varied", [False, True], ids=["fixed sizes", "varied sizes"])
def test_nothing_hangs_whatever_waits_for_the_device(varied: bool):
    for seed in range(60):
        for schedule in (random_schedule(seed, recompute=True), forwards_of(random_schedule(seed))):
            programs = lower(schedule)
            check(programs)
            assert ends(programs, varied=varied), programs


def test_nothing_hangs_with_collectives_of_all_ranks():
    for seed in range(60):
        passes = random_schedule(seed, shared=True)
        for schedule in (passes, forwards_of(passes)):
            programs = lower(schedule)
            check(programs)
            assert ends(programs), programs


@pytest.mark.parametrize("name", NAMED)
def test_no_schedule_by_name_hangs_nor_do_its_replicas(name: str):
    for ranks, n in ((2, 4), (3, 5), (4, 8)):
        assert ends(lower(plan(Request(name, ranks, n))), replicas=2)


def posted_one_pass_ahead(programs: Sequence[Program]) -> list[Program]:
    """The same, but with each receive posted just before the pass ahead of the one that uses it."""
    moved = []
    for program in programs:
        uses = {step.needed: index for index, step in enumerate(program.instructions) if step.needed is not None}
        passes = [index for index, action in enumerate(program.actions) if action.op not in Op]
        due: dict[int, list[int]] = {}
        for index, step in enumerate(program.instructions):
            if step.action.op in (Op.RECV_F, Op.RECV_B):
                before = [at for at in passes if at < uses[step.filled]]
                due.setdefault(before[-1] if before else uses[step.filled], []).append(index)
        actions = []
        for index, action in enumerate(program.actions):
            actions += [program.actions[each] for each in due.get(index, ())]
            if action.op not in (Op.RECV_F, Op.RECV_B):
                actions.append(action)
        moved.append(Program(program.rank, tuple(actions), program.placement, program.microbatches))
    return moved


def test_receives_posted_as_is_usual_would_hang_and_are_refused():
    """Each of two ranks waits, before its pass, for what the other sends only after its own."""
    usual = posted_one_pass_ahead(lower(plan(Request("1f1b", 2, 4))))
    assert ends(usual, waits=False)
    assert not ends(usual, patience=0.5)
    with pytest.raises(
        ProgramError, match="ranks wait for each other: rank 0 before 0F1 for message 0 of channel 1->0"
    ):
        check(usual)


def test_sends_that_wait_for_earlier_ones_hang_only_where_the_checker_says_so():
    """All forwards, then all backwards, on a rank whose peer does both in turn and posts its receives late."""
    n = range(8)
    rows = (
        [Pass(0, kind, m) for kind in (Kind.F, Kind.B) for m in n],
        [Pass(1, k, m) for m in n for k in (Kind.F, Kind.B)],
    )
    programs = lower(Schedule("by hand", sequential(2), len(n), tuple(map(tuple, rows))))
    check(programs)
    assert ends(programs, waits=False)
    late = posted_one_pass_ahead(programs)
    assert not ends(late, waits=False, patience=0.5)
    with pytest.raises(ProgramError, match="ranks wait for each other"):
        check(late)
    for seed in range(30):
        late = posted_one_pass_ahead(lower(random_schedule(seed)))
        try:
            check(late)
        except ProgramError:
            continue
        assert ends(late, waits=False)


@pytest.mark.parametrize("name", of_which_by_day([*NAMED, "adaptive", "auto"], "interleaved-1f1b", "adaptive"))
def test_every_plan_of_every_size_is_proved_whatever_its_costs(name: str):
    """Those that are searched for too, at limits and costs at which other placements of receives were refused."""
    sizes = ((2, 7), (4, 16), (5, 3), (8, 16), (16, 9)) if name == "adaptive" else ((2, 7), (4, 16), (7, 30), (16, 9))
    for (d, n), costs in product(sizes, ("1,1.1,0.75", REAL, "1,1,1,7")):
        request = Request(name, d, n, Costs.parse(costs), memory_limit=1.0, search_seconds=0.02)
        schedule = make_plan(request).schedule
        check(lower(schedule, request.costs.on(schedule.placement)))
        check(lower(schedule))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("d", [24, 33, 48, 64])
def test_long_pipelines_are_proved_too(name: str, d: int):
    schedule = plan(Request(name, d, d // 2 + 3))
    check(lower(schedule))
