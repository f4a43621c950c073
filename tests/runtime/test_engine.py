"""The engine: programs carried out on real layers, with exactly the gradients of a run without a pipeline."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Action, Program, ProgramError
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from tests.counting import lines_run
from tests.programs.random_schedules import forwards_of, random_schedule
from tests.runtime.plain_stages import PlainStages, without_pipeline
from tests.runtime.thread_ranks import run_threads


class NoTransport:
    """For one rank: there is nobody to talk to."""

    def send(self, peer: int, tensor: Tensor) -> None:
        raise AssertionError("a single rank sends nothing")

    def receive(self, peer: int) -> None:
        raise AssertionError("a single rank receives nothing")

    def finish(self) -> None:
        pass


def one_rank(order: str, n: int = 1, chunks: int = 1) -> Program:
    placement = replace(sequential(1), rank_of=(0,) * chunks)
    (program,) = lower(Schedule("by hand", placement, n, (tuple(map(Pass.parse, order.split())),)))
    return program


def in_a_wrong_order(program: Program) -> Program:
    """Which lowering would not have made."""
    return replace(program, actions=program.actions[::-1])


def check_equal(found: dict[int, list[Tensor]], expected: dict[int, list[Tensor]]) -> None:
    for stage, gradients in found.items():
        for gradient, reference in zip(gradients, expected[stage], strict=True):
            assert torch.equal(gradient, reference), f"stage {stage}"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_any_valid_schedule_gives_the_gradients_of_a_plain_run(seed: int):
    schedule = random_schedule(seed, recompute=True)
    expected, losses = without_pipeline(schedule)
    programs = lower(schedule)
    check(programs)
    all_stages = [
        PlainStages(schedule.placement.stages_of(r), schedule.placement.last_stage) for r in range(len(programs))
    ]

    def body(program: Program, transport: Transport) -> None:
        run(program, all_stages[program.rank], transport)

    run_threads(programs, body)
    found_losses: dict[int, Tensor] = {}
    for stages in all_stages:
        check_equal(stages.gradients(), expected)
        found_losses |= stages.losses
    assert found_losses == losses


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-1p", "1f1b-v", "v-min", "v-half", "v-zb"])
def test_named_schedules_and_their_forwards_alone(name: str):
    schedule = plan(Request(name, 4, 6))
    expected, losses = without_pipeline(schedule)
    for passes in (schedule, forwards_of(schedule)):
        placement = passes.placement
        all_stages = [PlainStages(placement.stages_of(r), placement.last_stage) for r in range(4)]

        def body(program: Program, transport: Transport, stages: list[PlainStages] = all_stages) -> None:
            run(program, stages[program.rank], transport)

        run_threads(lower(passes), body)
        assert {m: loss for stages in all_stages for m, loss in stages.losses.items()} == losses
        if passes is schedule:
            for stages in all_stages:
                check_equal(stages.gradients(), expected)


class Recorder:
    """Stages that hand on what they are told to and remember what they were given."""

    def __init__(self, outputs: dict[int, Tensor | None] | None = None) -> None:
        self.outputs = outputs or {}
        self.calls: list[tuple[str, int, int]] = []
        self.reduced: list[int] = []
        self.given: list[Tensor | None] = []

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        self.calls.append(("split forward" if split else "forward", stage, microbatch))
        self.given.append(activation)
        return self.outputs.get(stage)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self.calls.append(("backward", stage, microbatch))
        return torch.ones(1)

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self.calls.append(("backward_input", stage, microbatch))
        return torch.ones(1)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self.calls.append(("backward_weight", stage, microbatch))

    def reduce_gradients(self, stage: int) -> None:
        self.reduced.append(stage)


def test_a_message_to_the_same_rank_copies_nothing_and_passes_a_leaf():
    source = torch.ones(4, requires_grad=True)
    output = source * 2
    stages = Recorder({0: output, 1: None})
    run(one_rank("0F0 1F0", chunks=2), stages, NoTransport())
    activation = stages.given[1]
    assert activation is not None and activation.is_leaf and not activation.requires_grad
    assert activation.data_ptr() == output.data_ptr()
    output.data = torch.empty(1)  # a stage may drop its own output
    assert torch.equal(activation, torch.full((4,), 2.0))


def test_the_program_alone_decides_what_is_called():
    stages = Recorder()
    run(one_rank("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0B2", n=3), stages, NoTransport())
    assert stages.calls == [
        ("split forward", 0, 0),
        ("split forward", 0, 1),
        ("backward_input", 0, 0),
        ("forward", 0, 2),
        ("backward_weight", 0, 0),
        ("backward_input", 0, 1),
        ("backward_weight", 0, 1),
        ("backward", 0, 2),
    ]
    assert stages.reduced == [0]


def test_the_observer_sees_every_action_begin_and_end():
    seen: list[str] = []

    class Observer:
        def began(self, action: Action) -> None:
            seen.append(f"+{action}")

        def arrived(self) -> None:
            seen.append("nothing comes from elsewhere here")

        def ended(self, action: Action) -> None:
            seen.append(f"-{action}")

    run(one_rank("0F0 0B0"), Recorder(), NoTransport(), [Observer()])
    assert seen == ["+0F0", "-0F0", "+0B0", "-0B0", "+0REDUCE0", "-0REDUCE0"]


def test_an_error_carries_rank_and_action_and_stops_the_rank_at_once():
    class Failing(Recorder):
        def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
            raise ValueError("no good")

    stages = Failing()
    with pytest.raises(ValueError, match="no good") as caught:
        run(one_rank("0F0 0B0 0F1 0B1", n=2), stages, NoTransport())
    assert caught.value.__notes__ == ["on pipeline rank 0 of 1, at 0B0"]
    assert stages.calls == [("forward", 0, 0)]


def test_a_stage_that_returns_nothing_is_named():
    with pytest.raises(ProgramError, match="0F0 returned nothing, and it has to give stage 1's input of microbatch 0"):
        run(one_rank("0F0 1F0", chunks=2), Recorder(), NoTransport())


class WithoutGradient(Recorder):
    """Stages whose outputs do not depend on their inputs through autograd."""

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return None

    backward_input = backward


@pytest.mark.parametrize("backward", ["0F0 1F0 1B0 0B0", "0F0 1F0 1I0 0I0 1W0 0W0"])
def test_a_stage_that_gives_its_input_no_gradient_is_told_in_plain_words(backward: str):
    said = "the backward of stage 1, microbatch 0 gave its input no gradient, and stage 0 waits for it: .*no_grad"
    with pytest.raises(ProgramError, match=said):
        run(one_rank(backward, chunks=2), WithoutGradient({0: torch.ones(1)}), NoTransport())


def test_unsound_programs_end_with_an_error():
    with pytest.raises(ProgramError, match="1F0 needs stage 1's input of microbatch 0, which is not there"):
        run(in_a_wrong_order(one_rank("0F0 1F0", chunks=2)), Recorder({0: torch.ones(1)}), NoTransport())
    with pytest.raises(ProgramError, match="1 tensors were made or received and never used: stage 1's input") as caught:
        run(one_rank("0F0", chunks=2), Recorder({0: torch.ones(1)}), NoTransport())
    assert caught.value.__notes__ == ["on pipeline rank 0 of 1, at the end of the program"]


def test_nothing_is_kept_between_passes_that_use_it_up():
    """What a pass was given is let go of as soon as it is used: only the stages decide what stays."""
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    class Making(Recorder):
        def forward(
            self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
        ) -> Tensor | None:
            alive.append(sum(ref() is not None for ref in made))
            output = torch.ones(3)
            made.append(weakref.ref(output.untyped_storage()))
            return output

    n = 20
    order = " ".join(f"0F{m} 1F{m}" for m in range(n))
    run(one_rank(order, n=n, chunks=2), Making(), NoTransport())
    assert max(alive) <= 1


def test_the_engine_runs_few_lines_for_a_pass():
    """20 of Python, those of the test's stages among them, without messages."""
    n = 64
    forwards = [f"{stage}F{m}" for m in range(n) for stage in (0, 1)]
    backwards = [f"{stage}{kind}{m}" for kind in "IW" for m in range(n) for stage in (1, 0)]
    program = one_rank(" ".join(forwards + backwards), n=n, chunks=2)
    stages = Recorder({0: torch.ones(1)})
    run(program, stages, NoTransport())  # what a program is asked first, it remembers
    assert lines_run(lambda: run(program, stages, NoTransport())) < 20 * len(program.actions)
