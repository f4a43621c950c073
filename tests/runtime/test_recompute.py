"""Recomputed forwards: the same gradients to the bit, each chosen layer run twice, and only inputs held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import ProgramError
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.recompute import Recomputes, recompute_layer
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.text_forms import from_csv
from tests.runtime.plain_stages import PlainStages, SplitLinear, without_pipeline
from tests.runtime.test_engine import NoTransport, Recorder, check_equal, one_rank

FEATURES = 8


@contextmanager
def _drawn_from(state: Tensor) -> Iterator[None]:
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def random_state() -> Callable[[], AbstractContextManager[None]]:
    return partial(_drawn_from, torch.get_rng_state())


class Layer(nn.Module):
    """Much that a layer may do: dropout, a linear that may be split, several inputs and outputs of any kind."""

    def __init__(self, store: WeightGradients) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(FEATURES), SplitLinear(FEATURES, store)
        self.bias = nn.Parameter(torch.randn(FEATURES))
        self.runs = 0

    def forward(self, x: Tensor, sides: dict[str, Any], *, scale: float) -> tuple[Tensor, dict[str, Any]]:
        self.runs += 1
        y = nn.functional.dropout(self.linear(self.norm(x)).tanh(), 0.3) * scale
        with torch.enable_grad():  # as Megatron's layers
            x = x + nn.functional.dropout(y + self.bias, 0.2)
        seen = sides["mask"] if sides["side"] is None else sides["side"] * x.sigmoid()
        side = torch.where(sides["mask"], x, 0.0) + seen
        return x, {**sides, "side": side, "step": sides["step"] + 1}


class Job:
    """Three layers, some recomputed, on microbatches whose forwards have random numbers from one state."""

    def __init__(self, chosen: tuple[int, ...], meter: ActivationMeter | None = None, *, fed: bool = True) -> None:
        torch.manual_seed(1)
        self.store, self.recomputes = WeightGradients(meter), Recomputes(random_state)
        self.layers = nn.ModuleList(Layer(self.store) for _ in range(3))
        for at in chosen:
            recompute_layer(self.layers[at], self.recomputes)
        torch.manual_seed(2)
        self._meter = meter.recording if meter else nullcontext
        self._inputs = [torch.randn(5, FEATURES, requires_grad=fed) for _ in range(3)]
        self._open: dict[int, Tensor] = {}
        self.outputs: list[Tensor] = []

    def F(self, m: int, recompute: bool = True) -> None:  # noqa: N802 - as passes are called
        x, sides = self._inputs[m], {"mask": torch.arange(FEATURES) % 3 == 0, "side": None, "step": 0}
        with self._meter(), self.store.split(0, m), self.recomputes.forward(0, m) if recompute else nullcontext():
            for layer in self.layers:
                x, sides = layer(x, sides, scale=0.7)
        assert sides["step"] == 3
        self._open[m] = (x * sides["side"]).sum()
        self.outputs.append(self._open[m].detach())

    def R(self, m: int) -> None:  # noqa: N802
        with self._meter(), self.store.split(0, m):
            self.recomputes.run(0, m)

    def I(self, m: int) -> None:  # noqa: E743, N802
        with self.store.input_gradient(0, m):
            self._open.pop(m).backward()

    def W(self, m: int) -> None:  # noqa: N802
        self.store.run(0, m)

    def gradients(self) -> list[Tensor | None]:
        self.store.assert_empty()
        self.recomputes.assert_empty()
        return [each.grad for each in (*self._inputs, *self.layers.parameters())]

    def do(self, order: str, without: tuple[int, ...] = ()) -> Job:
        for name in order.split():
            kind, m = name[0], int(name[1:])
            if kind == "F":
                self.F(m, recompute=m not in without)
            else:
                getattr(self, kind)(m)
        return self


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))


PLAIN = "F0 F1 I0 F2 W0 I1 I2 W1 W2"


@pytest.mark.parametrize("chosen", [(0, 1, 2), (0,), (1, 2)])
@pytest.mark.parametrize("fed", [True, False])
def test_gradients_are_the_same_to_the_bit_and_chosen_layers_run_twice(chosen: tuple[int, ...], fed: bool) -> None:
    plain = Job((), fed=fed).do(PLAIN, without=(0, 1, 2))
    job = Job(chosen, fed=fed).do("F0 F1 R0 R1 I0 F2 W0 I1 R2 I2 W1 W2")
    assert [layer.runs for layer in job.layers] == [6 if at in chosen else 3 for at in range(3)]
    assert all(map(torch.equal, job.outputs, plain.outputs)), "random numbers went on as without R"
    assert_same(job.gradients(), plain.gradients())


def test_of_some_microbatches_only() -> None:
    plain = Job(()).do(PLAIN, without=(0, 1, 2))
    job = Job((0, 1, 2)).do("F0 F1 I0 R1 F2 W0 I1 I2 W1 W2", without=(0, 2))
    assert [layer.runs for layer in job.layers] == [4, 4, 4]
    assert_same(job.gradients(), plain.gradients())


def test_f_holds_inputs_and_r_what_f_holds_without_it() -> None:
    meter = ActivationMeter()
    plain = Job((), meter)
    meter._exclude = tuple(plain.layers.parameters())
    plain.do("F0", without=(0,))
    whole = meter.current
    plain.do("I0")
    waiting = meter.current
    plain.do("W0")
    assert meter.current == 0

    meter = ActivationMeter()
    job = Job((0, 1, 2), meter)
    meter._exclude = tuple(job.layers.parameters())
    job.F(0)
    hidden, mask = 4 * 5 * FEATURES, FEATURES
    # x and side of the last layer are for the loss, which is made outside of the recording.
    assert meter.current == 3 * hidden + 2 * hidden + mask
    job.R(0)
    assert meter.current == whole
    job.I(0)
    assert meter.current == waiting
    job.W(0)
    assert meter.current == 0


class _Adds(nn.Module):
    """A layer whose backward needs nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_from_r_on_an_input_that_no_backward_needs_is_no_longer_held() -> None:
    meter, layer, recomputes = ActivationMeter(), _Adds(), Recomputes(random_state)
    recompute_layer(layer, recomputes)
    with meter.recording(), recomputes.forward(0, 0):
        output = layer(torch.randn(5, FEATURES))
    assert meter.current == 4 * 5 * FEATURES
    recomputes.run(0, 0)
    assert meter.current == 0
    output.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((FEATURES,), 5.0))


def test_outside_of_its_f_a_layer_is_as_it_was() -> None:
    job = Job((0, 1, 2))
    with torch.no_grad():
        job.layers[0](torch.randn(5, FEATURES), {"mask": torch.ones(1).bool(), "side": None, "step": 0}, scale=1.0)
    assert job.layers[0].runs == 1
    job.recomputes.assert_empty()


def test_a_layer_with_nothing_to_train_is_not_recomputed() -> None:
    recomputes, layer = Recomputes(random_state), nn.Linear(2, 2).requires_grad_(False)
    recompute_layer(layer, recomputes)
    with recomputes.forward(0, 0):
        assert not layer(torch.ones(1, 2)).requires_grad
    recomputes.run(0, 0)


def test_what_goes_wrong() -> None:
    job = Job((0,)).do("F0 F1 F2", without=(2,))
    with pytest.raises(RuntimeError, match=r"forwards not recomputed: 0R0 \(1 layers\), 0R1 \(1 layers\)"):
        job.recomputes.assert_empty()
    with pytest.raises(ProgramError, match="the backward of stage 0, microbatch 0 comes before 0R0"):
        job.I(0)
    with pytest.raises(ProgramError, match="0R2: its forward kept nothing to recompute"):
        job.R(2)
    job.R(1)
    with pytest.raises(ProgramError, match="or was recomputed already"):
        job.R(1)


def _with_a_backward_of_its_own(job: Job, backward: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
    """Gradients of a microbatch whose loss is scaled by what ``backward`` makes of an input and a sum."""
    x, sides = job._inputs[0], {"mask": torch.arange(FEATURES) % 3 == 0, "side": None, "step": 0}
    refused = job.store.leaves.without_graph(job.recomputes.parameters, "not of a recomputed layer's weight")
    with job.store.split(0, 0), job.recomputes.forward(0, 0), refused:
        for layer in job.layers:
            x, sides = layer(x, sides, scale=0.7)
        total = (x * sides["side"]).sum()
        job._open[0] = total * backward(job._inputs[0], total)
    job.do("R0 I0 W0")
    return job.gradients()


def _of_the_input(x: Tensor, total: Tensor) -> Tensor:
    return torch.autograd.grad(total, x, retain_graph=True)[0].norm()


def _whole(x: Tensor, total: Tensor) -> Tensor:
    total.backward(retain_graph=True)
    assert x.grad is not None
    return x.grad.norm().clone()


@pytest.mark.parametrize("backward", [_of_the_input, _whole])
def test_user_code_may_run_a_backward_of_its_own_before_r(backward: Callable[[Tensor, Tensor], Tensor]) -> None:
    expected = _with_a_backward_of_its_own(Job(()), backward)
    for chosen in ((0,), (0, 1, 2)):
        found = _with_a_backward_of_its_own(Job(chosen), backward)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_what_a_backward_cannot_have_before_r_is_refused() -> None:
    job = Job((1,))
    with pytest.raises(RuntimeError, match="create_graph=True reaches a layer that the plan recomputes"):
        _with_a_backward_of_its_own(job, lambda x, total: torch.autograd.grad(total, x, create_graph=True)[0].norm())
    for at, allow in ((1, False), (1, True), (0, False)):
        job = Job((1,))
        weight = job.layers[at].linear.weight

        def asks(_: Tensor, total: Tensor, weight: Tensor = weight, allow: bool = allow) -> Tensor:
            return torch.autograd.grad(total, weight, retain_graph=True, allow_unused=allow)[0].norm()

        if at == 0:
            assert _with_a_backward_of_its_own(job, asks)
            continue
        with pytest.raises(RuntimeError, match="not of a recomputed layer's weight"):
            _with_a_backward_of_its_own(job, asks)


def test_an_input_that_was_written_to_is_an_error() -> None:
    job = Job((0,)).do("F0")
    with torch.no_grad():
        job._inputs[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        job.R(0)


def test_an_error_of_r_leaves_the_random_state_as_it_was() -> None:
    job = Job((0,)).do("F0")
    before = torch.get_rng_state()
    job.layers[0].linear.forward = lambda x: torch.rand(3).mm(x)  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        job.R(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_program_says_which_forwards_are_recomputed() -> None:
    program = one_rank("0F0 0F1 0R1 0B0 0I1 0W1", n=2)
    check([program])
    assert program.has_recompute and not one_rank("0F0 0B0").has_recompute
    assert [program.recomputes(0, m) for m in range(2)] == [False, True]
    assert [program.splits(0, m) for m in range(2)] == [False, True]


def test_the_engine_carries_it_out() -> None:
    """R well before its I with other passes between, of two stages on one rank, one of them whole."""
    schedule = from_csv("0F0,1F0,1R0,0F1,0R0,1F1,1B0,0R1,1I1,1W1,0B0,0I1,0W1\n")
    expected, _ = without_pipeline(schedule)
    (program,) = lower(schedule)
    stages = PlainStages(range(2), 1)
    run(program, stages, NoTransport())  # type: ignore[arg-type]
    check_equal(stages.gradients(), expected)  # type: ignore[arg-type]


def test_stages_without_it_and_programs_in_a_wrong_order_say_so() -> None:
    class Without(Recorder):
        recompute_forward = Stages.recompute_forward

    program = one_rank("0F0 0R0 0B0")
    with pytest.raises(ProgramError, match="these stages recompute no forward"):
        run(program, Without(), NoTransport())  # type: ignore[abstract, arg-type, misc]
    forward, recompute, backward, *rest = program.actions
    wrong = replace(program, actions=(forward, backward, recompute, *rest))
    with pytest.raises(ProgramError, match="comes before 0R0"):
        run(wrong, PlainStages([0], 0), NoTransport())  # type: ignore[arg-type]
