"""Transport, collectives, offload and deferred W on a device that is behind: no use after free, and no more memory.

The model of the device is :mod:`tests.runtime.stream_model`. Each fault that is planted here must be found.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.schedules.integration.linears.products import Product, Spread
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime import saved_tensors, transport
from megatron.schedules.runtime.collectives import SideStream
from megatron.schedules.runtime.copies import StreamCopies
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.transport import ChannelEnd, Channels, MessageSpec, Transport
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.placement import sequential
from tests.programs.random_schedules import random_schedule
from tests.runtime.plain_stages import SHAPE
from tests.runtime.stream_model import Event, FaultError, Group, Stream, StreamModel, Work
from tests.runtime.test_offload import OffloadingStages, random_distances
from tests.support.offloaded import offloaded

CPU = torch.device("cpu")
SPEC = MessageSpec(SHAPE, torch.float32, CPU)
PACES = (0.0, 0.5, 0.9, 1.0)
"""From a host that runs ahead of everything to a device that is never behind."""


@pytest.fixture(autouse=True)
def _by_reference_counts_alone() -> Iterator[None]:
    """What is let go of must not wait for the garbage collector, nor the streams of one model for the next."""
    gc.disable()
    yield
    gc.enable()


def messages(model: StreamModel, program: Program) -> Transport:
    """A rank's transport, between it and peers that only the model has."""
    peers = {action.peer for action in program.actions if action.peer is not None}
    ends = [{peer: ChannelEnd(Group(model), 0, streams=True) for peer in peers} for _ in range(2)]  # type: ignore[arg-type]
    return Transport(Channels(*ends, CPU), SPEC)


# --- the model itself ---------------------------------------------------------------------------------------------


def test_memory_freed_while_another_stream_uses_it_is_found():
    with StreamModel() as model:
        side, x = model.Stream(CPU), torch.zeros(8)
        side.wait_stream(model.current_stream())
        with model.stream(side):
            y = x + 1
        del x
        with pytest.raises(FaultError, match="memory was freed to stream 0 before operation 1 of stream 1"):
            torch.zeros(8)
        del y


def test_a_result_that_is_not_waited_for_is_found():
    with StreamModel() as model:
        side, x = model.Stream(CPU), torch.zeros(8)
        with model.stream(side), pytest.raises(FaultError, match="aten::add on stream 1 does not wait"):
            x + 1
        side.wait_stream(model.current_stream())
        with model.stream(side):
            y = x + 1
        with pytest.raises(FaultError, match="aten::mul on stream 0 does not wait"):
            y * 2
        with pytest.raises(FaultError, match="aten::add_ on stream 0 does not wait"):
            x.add_(1)
        model.current_stream().wait_stream(side)
        x.add_(y * 2)


@pytest.mark.parametrize("pace", PACES)
def test_recorded_memory_is_reused_when_the_host_sees_its_stream_pass(pace: float):
    with StreamModel(pace) as model:
        side = model.Stream(CPU)
        for _ in range(200):
            x = torch.zeros(8)
            side.wait_stream(model.current_stream())
            with model.stream(side):
                x.add_(1)
            model.record_stream(x, side)
            del x
    assert model.peak == 200 * 32 if pace == 0 else model.peak < 200 * 32
    assert pace != 1 or model.peak == 32


def test_memory_is_counted_until_it_is_freed():
    with StreamModel() as model:
        x = torch.zeros(8)
        view = x[2:]
        del x
        assert model.held == 32
        y = view * 2
        assert model.held == 32 + 24
        del view, y
        assert (model.held, model.peak) == (0, 56)


# --- what runs on it ----------------------------------------------------------------------------------------------


def rank_of(seed: int, model: StreamModel) -> None:
    """All passes and messages of one rank of a random schedule, some activations offloaded or recomputed."""
    schedule = random_schedule(seed, recompute=bool(seed % 2))
    programs = lower(schedule if seed % 2 else offloaded(schedule, random_distances(seed)))
    program = programs[seed % len(programs)]
    made = StreamCopies(CPU, cuda=model)
    made.smallest = 1  # type: ignore[misc]
    with model:
        stages = OffloadingStages(program, Offloads(made))
        run(program, stages, messages(model, program))
        stages.gradients()
        stages.offloads.assert_empty()


def chains_of(seed: int, model: StreamModel) -> None:
    """Collectives that compute on their own stream, of tensors that the computing stream makes and takes."""
    rng, group = random.Random(seed), Group(model)

    def chain(x: Tensor) -> Tensor:
        y = x * 2
        group.collective([x], [y]).wait()
        return y + 1

    with model:
        runner, coming = SideStream(CPU, cuda=model), []
        for _ in range(40):
            if coming and rng.random() < 0.5:
                coming.pop(rng.randrange(len(coming))).wait().sum()
            else:
                coming.append(runner.post(partial(chain, torch.ones(8))))
        runner.finish()
        torch.ones(8)


def weights_of(seed: int, model: StreamModel) -> None:
    """W in any order, each with an operand that is gathered on another stream ahead of it."""
    rng, group = random.Random(seed), Group(model)

    class Gathering(Product):
        @staticmethod
        def gathered(part: Tensor, _: Any) -> tuple[Tensor, Work]:
            whole = part.new_empty(2 * len(part), part.shape[1])
            return whole, group.collective([part], [whole])

        def multiply(self, x: Tensor, gradient: Tensor) -> tuple[Tensor]:
            return (gradient.t() @ x,)

    with model:
        store, weight = WeightGradients(), nn.Parameter(torch.ones(3, 4))
        waiting: list[tuple[int, int]] = []
        for m in range(20):
            with store.split(0, m):
                for _ in range(2):
                    rows, spread = (torch.ones(2, 4), torch.ones(4, 3)), Spread(group, None, ahead=False)  # type: ignore[arg-type]
                    store.add(Gathering(store, (0, m), (weight,), rows, spread))
            waiting.append((0, m))
            while waiting and rng.random() < 0.5:
                work = waiting.pop(rng.randrange(len(waiting)))
                store.run(*work, rng.choice(waiting) if waiting else None)
        for work in waiting:
            store.run(*work)
        store.assert_empty()


RUNS: dict[str, Callable[[int, StreamModel], None]] = {"a rank": rank_of, "chains": chains_of, "weights": weights_of}


@pytest.mark.parametrize("what", RUNS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_memory_is_right_in_every_order_and_as_much_however_late_the_device_is(what: str, seed: int):
    peaks = []
    for pace in PACES:
        model = StreamModel(pace, seed)
        RUNS[what](seed, model)
        peaks.append(model.peak)
    assert len(set(peaks)) == 1, "of equal programs"


class Passing:
    """Stages that make a message of nothing, and hold none."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(SHAPE)

    backward = backward_input = forward

    def backward_weight(self, *_: Any) -> None: ...

    def reduce_gradients(self, *_: Any) -> None: ...


@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "zb-2p"])
def test_messages_take_the_memory_that_the_plan_counts(name: str):
    """And what a pass takes and makes itself."""
    size = torch.empty(SHAPE).nbytes
    for program in lower(plan(Request(name, 4, 12))):
        for pace in PACES:
            model = StreamModel(pace)
            with model:
                run(program, Passing(), messages(model, program))  # type: ignore[arg-type]
            assert program.placement == sequential(4), "whose ranks hand nothing on to themselves"
            assert program.messages_held * size <= model.peak <= (program.messages_held + 2) * size


# --- what must be found -------------------------------------------------------------------------------------------


def nothing(*_: Any, **__: Any) -> None: ...


def _sends_unwaited(patch: pytest.MonkeyPatch) -> None:
    def send(self: Group, *args: Any) -> Work:
        return original(self, *args)._replace(event=Event({}))

    original = Group.send
    patch.setattr(Group, "send", send)


def _chains_dropped(patch: pytest.MonkeyPatch) -> None:
    def post(self: SideStream, chain: Any) -> Any:
        found = original(self, chain)
        self._running.clear()
        return found

    original = SideStream.post
    patch.setattr(SideStream, "post", post)


def _without(owner: Any, name: str, method: str, who: Callable[[Stream], bool] = lambda _: True) -> Any:
    """Plants: while ``owner.name`` runs, streams' ``method`` does nothing."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def without(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                inner = stack.enter_context(pytest.MonkeyPatch.context())
                inner.setattr(Stream, method, nothing)
                return original(*args, **kwargs)

        patch.setattr(owner, name, without)

    return plant


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a send's memory is freed before it has ended": ("a rank", _sends_unwaited),
    "a receive is not waited for": ("a rank", _without(transport._Arriving, "wait", "wait_event")),
    "a copy begins before its source is there": ("a rank", _without(StreamCopies, "_begin", "wait_stream")),
    "pinned memory is written while it is read": ("a rank", _without(StreamCopies, "to_host", "wait_event")),
    "memory is freed while it is copied out": (
        "a rank",
        _without(saved_tensors.OffloadedForward, "free", "wait_event"),
    ),
    "a pass does not wait for the copy back": ("a rank", _without(Offloads, "arrive", "wait_event")),
    "a chain begins before its input is there": ("chains", _without(SideStream, "post", "wait_stream")),
    "a chain's result is not waited for": ("chains", _without(SideStream, "_wait", "wait_event")),
    "a chain's input is freed before it has ended": ("chains", _chains_dropped),
    "a gathered operand is not waited for": ("weights", _without(Product, "gradients", "wait_event")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    what, plant = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(Exception) as caught:
        for seed in range(40):
            RUNS[what](seed, StreamModel())
    assert isinstance(caught.value, FaultError) or "FaultError" in repr(caught.value.__cause__)


def test_messages_that_the_allocator_knows_take_more_memory_the_further_the_host_is_ahead(monkeypatch):
    """So :class:`ChannelEnd` passes memory on without its owner."""
    monkeypatch.setattr(transport, "disowned", lambda tensor: tensor)
    (program, *_) = lower(plan(Request("zb-1p", 4, 12)))
    peaks = []
    for pace in PACES:
        with StreamModel(pace) as model:
            run(program, Passing(), messages(model, program))  # type: ignore[arg-type]
        peaks.append(model.peak)
    assert peaks[0] > 2 * peaks[-1]
