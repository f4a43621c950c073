"""The store of deferred weight gradients: order, hooks, memory, and every misuse found out."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.schedules.runtime import weight_graph
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.deferred_gradient import Replayed
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.runtime.weight_graph import Closure
from tests.runtime.gathering_closure import GatheringClosure
from tests.runtime.plain_stages import SHAPE, SplitLinear
from tests.waiting import HANGS_S


def _count_hooks(parameter: Tensor, seen: list[Tensor]) -> object:
    """Record ``.grad`` whenever the accumulator fires, and take it away, as data parallelism does."""
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

    def hook(*_: object) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad)
        parameter.grad = None

    accumulator.register_hook(hook)
    return accumulator


def _w_of(store: WeightGradients, closure: Closure, microbatch: int = 0, **rest: Any) -> None:
    """A W of one closure."""
    with store.split(0, microbatch):
        store.defer((0, microbatch), closure, **rest)
    store.run(0, microbatch)


def test_current_is_set_inside_split_and_restored():
    store = WeightGradients()
    assert store.current is None
    with store.split(2, 0):
        assert store.current == (2, 0)
        with store.split(1, 3):
            assert store.current == (1, 3)
        assert store.current == (2, 0)
    assert store.current is None
    with pytest.raises(ValueError), store.split(0, 0):
        raise ValueError
    assert store.current is None


def test_run_keeps_the_queued_order_and_the_keys_apart():
    store, ran = WeightGradients(), []
    for key in ((0, 0), (1, 0), (0, 1)):
        with store.split(*key):
            pass
    for name, key in (("a", (0, 0)), ("b", (0, 1)), ("c", (0, 0)), ("d", (1, 0))):
        store.defer(key, lambda name=name: ran.append(name))
    assert store.waiting(0, 0) == 2 and store.waiting(7, 7) == 0
    store.run(0, 0)
    assert ran == ["a", "c"]
    store.run(1, 0)
    store.run(0, 1)
    assert ran == ["a", "c", "d", "b"]
    store.assert_empty()


def test_closures_run_without_grad_mode_and_give_gradients_without_history():
    store = WeightGradients()
    weight = torch.nn.Parameter(torch.ones(3))
    source = torch.ones(3, requires_grad=True)
    _w_of(store, lambda: [source * 2], parameters=[weight])
    assert weight.grad is not None and weight.grad.grad_fn is None
    assert not weight.grad.requires_grad


def test_a_parameter_used_twice_is_delivered_once():
    store, seen = WeightGradients(), []
    weight = torch.nn.Parameter(torch.zeros(2))
    other = torch.nn.Parameter(torch.zeros(1))
    keep = _count_hooks(weight, seen)
    with store.split(0, 0):
        pass
    store.defer((0, 0), lambda: [torch.tensor([1.0, 2.0]), torch.ones(1)], parameters=[weight, other])
    store.defer((0, 0), lambda: [torch.tensor([10.0, 20.0])], parameters=[weight])
    store.run(0, 0)
    assert [gradient.tolist() for gradient in seen] == [[11.0, 22.0]]
    assert other.grad is not None
    del keep


def test_hooks_of_a_parameter_without_a_gradient_run_as_in_a_whole_backward():
    seen: list[Tensor | None] = []
    weight = torch.nn.Parameter(torch.zeros(2))
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: seen.append(weight.grad))

    class GivesNone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, parameter: Tensor) -> Tensor:
            return parameter.sum()

        @staticmethod
        def backward(ctx, _: Tensor) -> None:
            return None

    GivesNone.apply(weight).backward()
    _w_of(WeightGradients(), lambda: [None], parameters=[weight])
    assert seen == [None, None] and weight.grad is None


def test_prefetch_runs_once_and_ahead_of_the_closure_before_it():
    store, log = WeightGradients(), []
    with store.split(0, 0):
        pass
    for name in "abc":
        run, get = partial(log.append, f"run {name}"), partial(log.append, f"get {name}")
        store.add(GatheringClosure((0, 0), run, get))
    store.prefetch(0, 0)
    assert log == ["get a"]
    store.run(0, 0)
    assert log == ["get a", "get b", "run a", "get c", "run b", "run c"]


def test_the_next_w_is_prefetched_behind_the_last_product_of_this_one():
    store, log = WeightGradients(), []
    for microbatch in range(4):
        with store.split(0, microbatch):
            pass
    for name, microbatch in (("a", 0), ("b", 0), ("c", 1), ("d", 3)):
        run, get = partial(log.append, f"run {name}"), partial(log.append, f"get {name}")
        store.add(GatheringClosure((0, microbatch), run, get))
    store.run(0, 0, (0, 1))
    assert log == ["get a", "get b", "run a", "get c", "run b"]
    store.run(0, 1, (0, 2))
    store.run(0, 2, (0, 3))
    store.run(0, 3)
    assert log[5:] == ["run c", "get d", "run d"], "an empty W prefetches as it begins"


@pytest.mark.parametrize("call", ["run", "prefetch", "defer"])
def test_a_key_that_is_not_open_is_an_error(call: str):
    store = WeightGradients()
    with store.split(2, 1):
        pass
    store.run(2, 1)
    attempt = {
        "run": lambda: store.run(2, 1),
        "prefetch": lambda: store.prefetch(2, 1),
        "defer": lambda: store.defer((2, 1), lambda: None),
    }[call]
    with pytest.raises(RuntimeError, match="stage 2, microbatch 1"):
        attempt()


def test_assert_empty_names_what_is_left():
    store = WeightGradients()
    store.assert_empty()
    with store.split(3, 5):
        pass
    with pytest.raises(RuntimeError, match=r"3W5 \(0 queued\)"):
        store.assert_empty()


def test_a_held_tensor_that_was_written_to_is_an_error():
    store = WeightGradients()
    gradient = torch.zeros(2, 3)
    with store.split(0, 4):
        pass
    store.defer((0, 4), lambda: None, [gradient])
    gradient.add_(1)
    with pytest.raises(RuntimeError, match=r"\(2, 3\) held for 0W4 was modified"):
        store.run(0, 4)


def test_a_function_mode_sees_what_a_closure_does_and_no_check_of_what_it_holds():
    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    store, held = WeightGradients(), torch.ones(2)
    weight = torch.nn.Parameter(torch.zeros(2))
    with Watching():
        _w_of(store, lambda: [torch.mul(held, 2)], held_tensors=[held], parameters=[weight])
    assert torch.mul in seen and torch.Tensor._version.__get__ not in seen


def test_held_tensors_are_metered_until_each_closure_has_run():
    meter = ActivationMeter()
    store = WeightGradients(meter)
    with store.split(0, 0):
        pass
    seen = []
    for size in (10, 20):
        store.defer((0, 0), lambda: seen.append(meter.current), [torch.zeros(size)])
    assert meter.current == 30 * 4
    store.run(0, 0)
    assert seen == [30 * 4, 20 * 4]
    assert meter.current == 0


def test_each_closure_is_freed_before_the_next_runs():
    gc.disable()
    try:
        store = WeightGradients()
        with store.split(0, 0):
            pass
        held = torch.zeros(3)
        reference = weakref.ref(held)
        store.defer((0, 0), lambda held=held: None, [held])
        alive = []
        store.defer((0, 0), lambda: alive.append(reference() is not None))
        del held
        store.run(0, 0)
        assert alive == [False]
    finally:
        gc.enable()


@pytest.mark.parametrize(("together", "expected"), [(0, [0, 0, 1, 2]), (16, [0, 0, 1, 1]), (24, [0, 0, 0, 0])])
def test_gradients_are_accumulated_before_more_are_computed(
    together: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared parameter's once its last use has been computed. Small ones are computed together, of 8 bytes here."""
    monkeypatch.setattr(weight_graph, "_TOGETHER", together)
    store, seen = WeightGradients(), []
    shared, own = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    keep = _count_hooks(shared, seen), _count_hooks(own, seen)
    with store.split(0, 0):
        pass
    fired: list[int] = []

    def gradient(parameter: Tensor) -> list[Tensor]:
        fired.append(len(seen))
        return [torch.ones_like(parameter)]

    for parameter in (shared, own, shared):
        store.defer((0, 0), lambda parameter=parameter: gradient(parameter), parameters=[parameter])
    store.defer((0, 0), lambda: fired.append(len(seen)))
    store.run(0, 0)
    assert fired == expected
    assert sorted(gradient.tolist() for gradient in seen) == [[1, 1], [2, 2]]
    del keep


def test_gradients_in_the_memory_of_graphs_are_accumulated_one_by_one() -> None:
    store, memory = WeightGradients(), torch.zeros(2)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    with store.split(0, 0):
        pass
    for number, parameter in enumerate(parameters):
        replays = number != 2
        make = partial(memory.fill_, number) if replays else partial(torch.full, (2,), float(number))
        closure = lambda make=make: [make()]  # noqa: E731
        store.defer((0, 0), closure, parameters=[parameter], replayed=Replayed() if replays else None)
    for parameter in parameters:  # what gets its memory must copy it
        parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", own.grad.clone()))
    store.run(0, 0)
    assert [parameter.grad.tolist() for parameter in parameters] == [[number] * 2 for number in range(4)]


def test_a_gradient_is_not_copied():
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    pointers: list[int] = []

    def gradient() -> list[Tensor]:
        made = torch.ones(4, 4)
        pointers.append(made.data_ptr())
        return [made]

    _w_of(WeightGradients(), gradient, parameters=[weight])
    assert weight.grad is not None and [weight.grad.data_ptr()] == pointers


def test_gradients_of_microbatches_add_up_in_the_dtype_of_the_parameter():
    store = WeightGradients()
    weight = torch.nn.Parameter(torch.zeros(2))
    _w_of(store, lambda: [torch.tensor([1.0, 2.0], dtype=torch.bfloat16)], parameters=[weight])
    _w_of(store, lambda: [torch.tensor([3.0, 4.0])], parameters=[weight])
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_hooks_fire_in_either_grad_mode(grad_mode: bool):
    seen: list[Tensor] = []
    weight = torch.nn.Parameter(torch.zeros(2))
    keep = _count_hooks(weight, seen)
    with nullcontext() if grad_mode else torch.no_grad():
        _w_of(WeightGradients(), lambda: [torch.ones(2)], parameters=[weight])
    assert len(seen) == 1 and seen[0].grad_fn is None
    del keep


def test_which_closures_there_are_may_change_with_every_microbatch():
    store = WeightGradients()
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(8)]
    expected = [0.0] * len(weights)
    for microbatch in range(300):
        with store.split(0, microbatch):
            pass
        for index, weight in enumerate(weights):
            if microbatch >> index & 1:
                expected[index] += microbatch
                gradient = torch.full((1,), float(microbatch))
                store.defer((0, microbatch), lambda gradient=gradient: [gradient], parameters=[weight])
        store.run(0, microbatch)
    assert [0.0 if weight.grad is None else weight.grad.item() for weight in weights] == expected


def test_a_parameter_that_is_frozen_at_first_gets_its_gradient_once_it_is_trained():
    store, weight, bias = WeightGradients(), torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    for microbatch, trained in enumerate((False, True, False)):
        bias.requires_grad_(trained)
        _w_of(store, lambda: [torch.ones(2), torch.ones(1)], microbatch, parameters=[weight, bias])
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]
    assert bias.grad is not None and bias.grad.tolist() == [1.0]


def test_a_parameter_has_the_hooks_and_the_dtype_that_it_has_now():
    store, seen = WeightGradients(), list[Tensor]()
    weight = torch.nn.Parameter(torch.zeros(2))
    older: Any = _count_hooks(weight, seen)
    _w_of(store, lambda: [torch.full((2,), 0.1, dtype=torch.float64)], parameters=[weight])
    del older
    weight.data = weight.data.double()
    newer = _count_hooks(weight, seen)
    _w_of(store, lambda: [torch.full((2,), 0.1, dtype=torch.float64)], parameters=[weight])
    assert [gradient.dtype for gradient in seen] == [torch.float32, torch.float64], "one hook each, none of before"
    assert seen[1].tolist() == [0.1, 0.1]
    del newer


def test_microbatches_of_a_call_share_a_graph_and_run_the_hooks_of_the_moment():
    store, seen = WeightGradients(), list[Tensor]()
    weight, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    doubled: list[Any] = []
    with store.keeping_graphs():
        for microbatch in range(4):
            if microbatch == 1:
                keep = _count_hooks(weight, seen)
            if microbatch == 2:
                doubled.append(weight.register_hook(lambda gradient: 2 * gradient))
            if microbatch == 3:
                doubled.pop().remove()
            with store.split(0, microbatch):
                store.defer((0, microbatch), lambda: [torch.ones(2)], parameters=[weight])
                store.defer(
                    (0, microbatch),
                    lambda m=microbatch: [torch.full((2,), m), torch.ones(2)],
                    parameters=[weight, other],
                )
            store.run(0, microbatch)
    # Of the first microbatch, before data parallelism takes gradients away, and of the second.
    assert [gradient.tolist() for gradient in seen] == [[3, 3], [6, 6], [4, 4]]
    assert other.grad is not None and other.grad.tolist() == [4, 4]
    alive = weakref.ref(weight)
    del weight, keep
    gc.collect()
    assert alive() is None


def test_after_a_closure_that_fails_a_shared_graph_serves_the_next_microbatch():
    store, weight = WeightGradients(), torch.nn.Parameter(torch.zeros(2))
    with store.keeping_graphs():
        with pytest.raises(ZeroDivisionError):
            _w_of(store, lambda: [torch.ones(2) / (1 // 0)], parameters=[weight])
        _w_of(store, lambda: [torch.ones(2)], microbatch=1, parameters=[weight])
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]


def test_forwards_of_a_call_share_a_leaf_while_the_weight_stays_where_it_is():
    store, weight = WeightGradients(), torch.nn.Parameter(torch.zeros(2))
    leaves = []
    with store.keeping_graphs():
        for microbatch in range(3):
            if microbatch == 2:
                weight.data = torch.ones(2)
            with store.split(0, microbatch):
                leaves.append(store.leaves.add((0, microbatch), weight).leaf)
    with store.split(0, 3):
        leaves.append(store.leaves.add((0, 3), weight).leaf)
    assert leaves[0] is leaves[1]
    assert len({id(leaf) for leaf in leaves}) == 3
    assert leaves[2].tolist() == [1.0, 1.0]


def test_a_gradient_at_a_leaf_that_open_microbatches_share_counts_once():
    store, weight, x = WeightGradients(), torch.nn.Parameter(torch.ones(2)), torch.tensor([3.0, 5.0])
    with store.keeping_graphs():
        for microbatch in range(3):
            with store.split(0, microbatch):
                product = (store.leaves.add((0, microbatch), weight).leaf * x).sum()
                (asked,) = torch.autograd.grad(product, weight, retain_graph=True)
                assert asked.tolist() == [3.0, 5.0]
                product.backward()
            assert weight.grad is not None and torch.equal(weight.grad, (microbatch + 1) * x)


def test_a_parameter_is_not_kept_alive():
    store, weight = WeightGradients(), torch.nn.Parameter(torch.zeros(2))
    with store.split(0, 0):
        leaf = store.leaves.add((0, 0), weight).leaf
    store.defer((0, 0), lambda: [torch.ones(2)], parameters=[weight])
    store.run(0, 0)
    alive = weakref.ref(weight), weakref.ref(leaf)
    del weight, leaf
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_gradient_that_i_computed_and_did_not_defer_is_an_error() -> None:
    store, weight = WeightGradients(), torch.nn.Parameter(torch.ones(3, 2))
    with store.split(1, 4):
        output = store.leaves.add((1, 4), weight).leaf.sum()
    with store.input_gradient(1, 4):
        output.backward()
    lost = (
        r"stage 1, microbatch 4: the gradient of a parameter of shape \(3, 2\) was computed in I and not deferred to W"
    )
    with pytest.raises(RuntimeError, match=lost):
        store.run(1, 4)


def test_after_a_closure_that_fails_the_next_w_is_right():
    store = WeightGradients()
    weight = torch.nn.Parameter(torch.zeros(2))

    def fails() -> list[Tensor]:
        raise LookupError("of the closure")

    with pytest.raises(LookupError, match="of the closure"):
        _w_of(store, fails, parameters=[weight])
    _w_of(store, lambda: [torch.ones(2)], microbatch=1, parameters=[weight])
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]


class _Toy(torch.autograd.Function):
    """A linear that defers its weight gradient, as an operation of any library may."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, parameter: Tensor, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = parameter, store, store.current
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        parameter, store, key = ctx.call
        store.defer(key, lambda: [gradient.t() @ x], (x, gradient), parameters=[parameter])
        return gradient @ weight, None, None, None


def _iteration(store: WeightGradients, weights: list[Tensor], microbatches: int) -> None:
    waiting = []
    for m in range(microbatches):
        with store.split(0, m):
            y = torch.full((64, 256), float(m), requires_grad=True)
            for weight in weights:
                y = _Toy.apply(y, weight.detach(), weight, store)
        y.sum().backward()
        waiting.append(m)
        if len(waiting) == 3:
            store.run(0, waiting.pop(0))
    for m in waiting:
        store.run(0, m)
    store.assert_empty()


def test_memory_is_flat_over_many_microbatches():
    meter = ActivationMeter()
    store = WeightGradients(meter)
    weights = [torch.nn.Parameter(torch.eye(256)) for _ in range(4)]
    _iteration(store, weights, 5)
    before, peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, meter.peak
    _iteration(store, weights, 200)
    assert meter.peak == peak and meter.current == 0
    # A leak of inputs and gradients would be 200 x 4 x 128 KiB = 100 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024


def _three_due(*, gathers: bool = False) -> tuple[WeightGradients, list[str], list[torch.nn.Parameter]]:
    """Three microbatches of a store, each with gradients of three weights (4, 2) from eight rows."""
    store, ran = WeightGradients(), list[str]()
    weights = [torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(3)]

    def closure(name: str) -> Closure:
        def run() -> list[Tensor]:
            ran.append(name)
            return [torch.ones(4, 2)]

        return run

    for microbatch in range(3):
        with store.split(0, microbatch):
            for which, weight in enumerate(weights):
                key, run = (0, microbatch), closure(f"{'abc'[which]}{microbatch}")
                held = [torch.ones(8, 2), torch.ones(8, 4)]
                if gathers and which == 1:
                    gather = partial(ran.append, f"gather{microbatch}")
                    store.add(GatheringClosure(key, run, gather, held, (weight,)))
                else:
                    store.defer(key, run, held, parameters=[weight])
    return store, ran, weights


_EACH = 2.0 * 8 * 4 * 2


def test_single_gradients_run_ahead_of_their_w_in_order_and_once():
    store, ran, weights = _three_due()
    store.run_ahead([(0, 0), (0, 1)], 2 * _EACH)
    assert ran == ["a0", "b0"] and store.waiting(0, 0) == 1
    store.run_ahead([(0, 0), (0, 1)], 2.4 * _EACH)
    assert ran[2:] == ["c0", "a1"], "the next would be longer than what is left by more than half"
    store.run_ahead([(0, 0), (0, 1)], 0.4 * _EACH)
    assert ran[4:] == []
    store.run_ahead([(0, 0), (0, 1)], 0.6 * _EACH)
    assert ran[4:] == ["b1"]
    for microbatch in range(3):
        store.run(0, microbatch)
    assert ran[5:] == ["c1", "a2", "b2", "c2"]
    store.assert_empty()
    assert all(weight.grad is not None and weight.grad.eq(3).all() for weight in weights)


def test_gradients_that_gather_stay_in_w_and_gather_at_the_same_points():
    whole, in_w, _ = _three_due(gathers=True)
    whole.run(0, 0, (0, 1))
    store, ran, _ = _three_due(gathers=True)
    store.run_ahead([(0, 0), (0, 1)], 100 * _EACH)
    assert ran == ["a0", "c0", "a1", "c1"]
    store.run(0, 0, (0, 1))
    assert ran[4:] == [each for each in in_w if each not in ran[:4]] == ["gather0", "b0"]
    store.run(0, 1)
    assert ran[6:] == ["gather1", "b1"]


def test_a_weight_that_is_used_twice_does_not_run_ahead():
    store, ran, weights = _three_due()
    store.defer((0, 0), lambda: [torch.ones(4, 2)], [torch.ones(8, 2)], parameters=[weights[0]])
    store.run_ahead([(0, 0), (0, 1)], 100 * _EACH)
    assert ran == ["b0", "c0", "b1", "c1"], "nor does its next microbatch: sums keep their order"


def test_what_ran_ahead_is_freed():
    store, weight = WeightGradients(), torch.nn.Parameter(torch.zeros(4, 2))
    rows = torch.ones(8, 2)
    seen = weakref.ref(rows)
    with store.split(0, 0):
        store.defer((0, 0), lambda rows=rows: [rows.new_ones(4, 2)], [rows], parameters=[weight])
    del rows
    store.run_ahead([(0, 0)], 1e9)
    gc.collect()
    assert seen() is None and store.parameters(0, 0) == set()
    store.run(0, 0)
    assert weight.grad is not None and weight.grad.eq(1).all(), "not twice"


def test_an_operand_in_memory_that_is_overwritten_before_w_is_copied() -> None:
    buffer, own = torch.zeros(4, 3), torch.ones(2)
    store = WeightGradients()
    assert store.kept(buffer) is buffer, "no memory is overwritten"
    store.volatile.add(buffer.untyped_storage().data_ptr())
    kept, untouched, *parts = (store.kept(each) for each in (buffer, own, [buffer[:1], own]))
    buffer.fill_(7.0)
    assert kept.abs().sum() == 0 and untouched is own
    assert parts[0][0].abs().sum() == 0 and parts[0][1] is own


class _Waiting(torch.autograd.Function):
    """The sum of its input. Its backward says that it has begun, and waits."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, begun: threading.Event, ends: threading.Event) -> Tensor:
        ctx.shape, ctx.events = tensor.shape, (begun, ends)
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        begun, ends = ctx.events
        begun.set()
        assert ends.wait(HANGS_S)
        return gradient.expand(ctx.shape), None, None


def test_a_backward_in_another_thread_takes_nothing_from_a_pass() -> None:
    store, begun, ends = WeightGradients(), threading.Event(), threading.Event()
    linear, other = SplitLinear(SHAPE[1], store), torch.ones(3, requires_grad=True)
    thread = threading.Thread(target=_Waiting.apply(other, begun, ends).backward)
    with store.split(0, 0):
        thread.start()
        assert begun.wait(HANGS_S)
        output = linear(torch.ones(SHAPE, requires_grad=True))
    with store.input_gradient(0, 0):
        ends.set()
        thread.join(HANGS_S)
        output.sum().backward()
    assert other.grad is not None and torch.equal(other.grad, torch.ones(3))
    assert store.waiting(0, 0) == 1 and linear.weight.grad is None
    store.run(0, 0)
    assert linear.weight.grad is not None
