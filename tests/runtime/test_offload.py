"""O and L: tensors that a forward saved are on the host between them, and come back unchanged."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.copies import ThreadCopies
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.graph_edge import as_input
from megatron.schedules.runtime.offload import OffloadError, Offloads
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.stall_watch import StallWatch
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from tests.programs.random_schedules import random_schedule
from tests.runtime.late_copies import LateCopies
from tests.runtime.plain_stages import PlainStages, without_pipeline
from tests.runtime.thread_ranks import run_threads
from tests.support.offloaded import offloaded

MIB = 2**20


@pytest.fixture(autouse=True)
def _by_reference_counts_alone():
    """What is let go of must not wait for the garbage collector."""
    gc.disable()
    yield
    gc.enable()


class OffloadingStages(PlainStages):
    """Plain stages whose activations go to the host where the program says so."""

    def __init__(self, program: Program, offloads: Offloads) -> None:
        placement = program.placement
        super().__init__(placement.stages_of(program.rank), placement.last_stage)
        self.program, self.offloads = program, offloads

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        offloaded = self.program.offloads(stage, microbatch)
        with self.offloads.forward(stage, microbatch) if offloaded else nullcontext(), self.offloads.saving():
            return super().forward(stage, microbatch, activation, split=split, recompute=recompute)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if self.program.offloads(stage, microbatch):
            self.offloads.arrive(stage, microbatch)
        return super().backward(stage, microbatch, gradient)

    def offload(self, stage: int, microbatch: int) -> None:
        self.offloads.offload(stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        self.offloads.load(stage, microbatch)


def random_distances(seed: int):
    """For each stage and microbatch where O and L stand, at random; for some there are none."""
    rng = random.Random(seed)
    share = rng.choice((0.5, 1.0))
    return lambda stage, m: (rng.randint(0, 5), rng.randint(0, 5)) if rng.random() < share else None


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_any_schedule_with_copies_gives_the_gradients_of_a_plain_run(seed: int):
    schedule = offloaded(random_schedule(seed), random_distances(seed))
    expected, losses = without_pipeline(schedule)
    programs = lower(schedule)
    check(programs)
    copies = [LateCopies() for _ in programs]
    ranks = [OffloadingStages(program, Offloads(copies[program.rank])) for program in programs]

    def body(program: Program, transport: Transport) -> None:
        run(program, ranks[program.rank], transport)

    run_threads(programs, body)
    found: dict[int, Tensor] = {}
    for program, stages, copied in zip(programs, ranks, copies, strict=True):
        for stage, gradients in stages.gradients().items():
            assert all(map(torch.equal, gradients, expected[stage])), f"stage {stage}"
        found |= stages.losses
        stages.offloads.assert_empty()
        # Of each stage's two linears and two GELUs: inputs of all but the first, which the stage has for its gradient
        # (or, as the model's data, for nothing), and the last stage's output, which the loss squares.
        last = program.placement.last_stage
        moved = [3 + (action.stage == last) for action in program.actions if action.op is Kind.O]
        assert copied.storages("out") == copied.storages("back") == sum(moved)
    assert found == losses


def sandwich(offloads: Offloads, forward, backward=Tensor.backward) -> None:
    """F, O, L, I of what ``forward`` computes; ``backward`` takes its result."""
    with offloads.forward(0, 0), offloads.saving():
        result = forward()
    offloads.offload(0, 0)
    offloads.load(0, 0)
    offloads.arrive(0, 0)
    backward(result)
    offloads.assert_empty()


def test_offloaded_activations_take_no_device_memory():
    meter, weight = ActivationMeter(), nn.Parameter(torch.randn(64, 64))
    offloads = Offloads(ThreadCopies())
    offloads.meter = meter
    x = torch.randn(64, 64, requires_grad=True)
    with meter.recording(), offloads.forward(1, 2), offloads.saving():
        loss = (x.clone() @ weight).exp().tanh().sum()
    held = meter.current
    assert held == (3 + 1) * 64 * 64 * 4, "input, two results, and the weight, which is not left out here"
    offloads.offload(1, 2)
    assert meter.current == 64 * 64 * 4, "the weight is everybody's"
    offloads.load(1, 2)
    assert meter.current == held, "L takes memory at its position"
    offloads.arrive(1, 2)
    assert meter.current == meter.peak == held
    loss.backward()
    assert meter.current == 0
    offloads.assert_empty()


def test_the_graph_lets_go_of_what_came_back_as_it_goes():
    meter, offloads, held = ActivationMeter(), Offloads(ThreadCopies()), []
    offloads.meter = meter
    x = torch.randn(1000, requires_grad=True)

    def forward() -> Tensor:
        middle = x.exp().exp()
        middle.register_hook(lambda gradient: held.append(meter.current))
        return middle.exp().sum()

    sandwich(offloads, forward)
    assert held == [2 * 4000], "two of three are still needed"
    assert meter.peak == 3 * 4000 and meter.current == 0


class _Saves(torch.autograd.Function):
    """Saves whatever views it is given and says in its backward what it found of them."""

    found: list[Tensor] = []  # noqa: RUF012 - of this module's tests

    @staticmethod
    def forward(ctx, x: Tensor, *views: Tensor) -> Tensor:
        ctx.save_for_backward(*views)
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor):
        _Saves.found[:] = ctx.saved_tensors
        return gradient, *[None] * len(ctx.saved_tensors)


def test_views_of_one_storage_are_copied_as_one_and_stay_views_of_one():
    copies, x = LateCopies(), torch.ones(1, requires_grad=True)
    numbers = torch.arange(48.0)

    def views() -> list[Tensor]:
        base = numbers.clone().view(6, 8)
        kinds = base[1:, ::2], base.t(), base[2], base.view(torch.int32)[0], base.as_strided((3, 3), (1, 2), 5)
        return [*kinds, base.to(torch.bfloat16)[:, 3], base > 7, torch.empty(0), torch.tensor(3.0)]

    sandwich(Offloads(copies), lambda: _Saves.apply(x, *views()))
    expected = views()
    assert len(_Saves.found) == len(expected)
    for one, other in zip(_Saves.found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    assert len({tensor.untyped_storage().data_ptr() for tensor in _Saves.found[:5]}) == 1
    assert [sorted(sizes) for _, sizes in copies.moved] == [sorted([48 * 4, 48 * 2, 48, 4])] * 2
    _Saves.found.clear()


def test_what_others_hold_stays():
    copies = LateCopies()
    model, table = nn.Linear(8, 8), torch.randn(8, 8)
    given = torch.randn(8, 8, requires_grad=True)
    kept: list[Tensor] = []

    def forward() -> Tensor:
        kept.append(model(given * table).exp())  # which its own backward needs
        return (kept[0] * 2).sum()

    sandwich(Offloads(copies), forward)
    expected = torch.autograd.grad((model(given * table).exp() * 2).sum(), [given, *model.parameters()])
    assert copies.moved == [("out", [256]), ("back", [256])], "the linear's input alone"
    assert all(map(torch.equal, [given.grad, *(p.grad for p in model.parameters())], expected))


def test_an_input_goes_where_its_holder_gives_it_up():
    copies, weight = LateCopies(), torch.randn(8, 8)
    offloads, activation = Offloads(copies), torch.randn(8, 8)
    expected = activation.clone().requires_grad_()
    (expected.exp() @ weight * expected).sum().backward()
    begun, taken = as_input(activation)
    with offloads.forward(0, 0, (begun,)), offloads.saving():
        loss = (begun.exp() @ weight * begun).sum()
    storage = activation.untyped_storage()
    del begun, activation
    offloads.offload(0, 0)
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "nobody but this test has it now"
    offloads.load(0, 0)
    offloads.arrive(0, 0)
    loss.backward()
    assert taken.grad is not None and torch.equal(taken.grad, expected.grad)
    assert copies.storages("out") == 3


def test_an_emptied_storage_that_is_refilled_stays():
    """As Megatron's selective recompute does with outputs."""
    copies, x, inside = LateCopies(), torch.randn(100, requires_grad=True), torch.randn(100)
    offloads = Offloads(copies)
    with offloads.forward(0, 0), offloads.saving():
        emptied = inside.exp()
        loss = (emptied * x).sum()
        emptied.untyped_storage().resize_(0)
    offloads.offload(0, 0)
    offloads.load(0, 0)
    offloads.arrive(0, 0)
    emptied.untyped_storage().resize_(400)
    emptied.untyped_storage().copy_(inside.exp().untyped_storage())
    loss.backward()
    assert torch.equal(x.grad, inside.exp()) and not copies.moved


def test_a_graph_that_was_dropped_takes_nothing_along():
    copies, x = LateCopies(), torch.randn(100, requires_grad=True)

    def forward() -> Tensor:
        x.exp().tanh().sum()
        return x.sin().exp().sum()

    sandwich(Offloads(copies), forward)
    assert copies.moved == [("out", [400]), ("back", [400])]


@pytest.mark.parametrize("when", ["in the forward", "while the copy reads it"])
def test_a_write_to_a_saved_tensor_is_still_an_error(when: str):
    x, offloads = torch.randn(3, requires_grad=True), Offloads(LateCopies())
    with offloads.forward(0, 0), offloads.saving():
        y = x * 2
        z = y.exp() * y.detach()
        view = y.detach()
        del y
        if when == "in the forward":
            view.mul_(3)
        else:
            offloads_reads = view
            del view
    if when != "in the forward":
        offloads_reads.mul_(3)
    offloads.offload(0, 0)
    offloads.load(0, 0)
    offloads.arrive(0, 0)
    with pytest.raises(RuntimeError, match="modified in place"):
        z.sum().backward()


def iteration(offloads: Offloads, size: int = 1000, microbatches: int = 3) -> None:
    """Several microbatches offloaded at once, and back in order."""
    x = torch.randn(size, requires_grad=True)
    losses = []
    for m in range(microbatches):
        with offloads.forward(0, m), offloads.saving():
            losses.append((x.exp() * torch.randn(size)).sum())
    for m in range(microbatches):
        offloads.offload(0, m)
    for m in range(microbatches):
        offloads.load(0, m)
        offloads.arrive(0, m)
        losses[m].backward()


def test_host_memory_is_allocated_once_and_reused():
    copies = LateCopies()
    offloads = Offloads(copies)
    for _ in range(3):
        iteration(offloads)
        assert len(copies.allocated) == 3 and offloads.host_bytes == sum(copies.allocated) == 3 * 12288
    iteration(offloads, 2400)
    assert len(copies.allocated) == 6, "microbatches that are larger than any before take more"


def test_too_little_host_memory_is_one_line():
    offloads = Offloads(LateCopies(pinned=10 * MIB), "leave the flag out")
    with pytest.raises(OffloadError) as caught:
        iteration(offloads, MIB)
    assert str(caught.value) == (
        "stage 0, microbatch 1: no 8 MiB of host memory beside the 8.25 MiB allocated "
        "(cudaHostRegister: out of memory); leave the flag out"
    )


class _Failing(ThreadCopies):
    """Copies of which some cannot be made."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way

    def to_host(self, pairs, after=None):
        return super().to_host(self._spoilt(pairs, "to the host"), after)

    def from_host(self, pairs):
        return super().from_host(self._spoilt(pairs, "from the host"))

    def _spoilt(self, pairs, way: str):
        return [(source, target[1:] if way == self._way else target) for source, target in pairs]


@pytest.mark.parametrize("way", ["to the host", "from the host"])
def test_a_copy_that_fails_ends_the_program_with_one_line(way: str):
    """Where it is waited for: at O, or at I."""
    x, offloads = torch.randn(MIB, requires_grad=True), Offloads(_Failing(way))
    with pytest.raises(OffloadError) as caught:
        sandwich(offloads, lambda: x.exp().sum())
    line = str(caught.value)
    assert line.startswith(f"stage 0, microbatch 0: the copy of 4 MiB {way} failed (") and line.endswith(
        "; offload less"
    )


def test_calls_out_of_order_are_errors():
    offloads, x = Offloads(LateCopies()), torch.randn(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="nothing of stage 1, microbatch 2 is offloaded"):
        offloads.offload(1, 2)
    with offloads.forward(0, 0), offloads.saving():
        loss = x.exp().sum()
    offloads.offload(0, 0)
    with pytest.raises(RuntimeError, match="stage 0, microbatch 0 are offloaded: no L came"):
        offloads.arrive(0, 0)
    with pytest.raises(RuntimeError, match="is offloaded to the host"):
        loss.backward()
    with pytest.raises(RuntimeError, match="still on the host: 0F0"):
        offloads.assert_empty()


def test_a_forward_that_raises_leaves_nothing_open():
    offloads, x = Offloads(LateCopies()), torch.randn(4, requires_grad=True)
    with pytest.raises(ValueError), offloads.forward(0, 0), offloads.saving():
        x.exp()
        raise ValueError
    offloads.assert_empty()
    with offloads.saving():
        x.exp().sum().backward()
    assert x.grad is not None


def program_of(order: str, n: int = 1) -> Program:
    """Of one rank with one stage."""
    (program,) = lower(Schedule("by hand", sequential(1), n, (tuple(map(Pass.parse, order.split())),)))
    return program


def test_a_program_knows_what_goes_and_counts_computing_alone():
    program = program_of("0F0 0F1 0O1 0I0 0L1 0W0 0I1 0W1", 2)
    assert program.offloads(0, 1) and not program.offloads(0, 0) and program.has_offload
    assert program.weights_after.get((Kind.W, 0, 0)) is None
    assert program.weights_after.get((Kind.I, 0, 0)) is None, "its own"
    assert program_of("0F0 0F1 0I0 0I1 0O0 0L0 0W0 0W1", 2).weights_after.get((Kind.I, 0, 1)) == (0, 0)
    assert program_of("0F0 0F1 0B0 0O1 0L1 0B1", 2).endings[Kind.B, 0, 1].passes_left == 0
    assert program_of("0F0 0O0 0I0 0W0 0L0").endings[Kind.W, 0, 0].passes_left == 0


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("0O0", "waits for copies to the host, which are slow or have stopped"),
        ("0I0", "waits for copies from the host, which are slow or have stopped"),
        ("0L0", "takes longer than that"),
        ("0B1", "takes longer than that"),
    ],
)
def test_who_waits_for_a_copy_says_so(action: str, says: str):
    program = program_of("0F0 0F1 0O0 0L0 0I0 0W0 0B1", 2)
    tracker = PositionTracker()
    tracker.begin(program)
    tracker.reach(next(each for each in program.instructions if str(each.action) == action))
    watch = StallWatch(tracker, 10.0, global_rank=0, advice="")
    line = next(line for _ in range(60) if (line := watch.look(1.0)))
    assert f"in {action}, which" in line and says in line
    assert ("copies" in line) == ("copies" in says)
