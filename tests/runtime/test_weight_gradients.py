"""The store of deferred weight gradients: order, hooks, memory, and every misuse found out."""

from __future__ import annotations

import gc
import resource
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import _DELIVERY_BYTES, WeightGradients, deliver


def _count_hooks(parameter: Tensor, seen: list[Tensor]) -> object:
    """Record ``.grad`` whenever the accumulator fires, and take it away, as data parallelism does."""
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

    def hook(*_: object) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad)
        parameter.grad = None

    accumulator.register_hook(hook)
    return accumulator


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
    with store.split(0, 0):
        pass
    store.defer((0, 0), lambda: [source * 2], parameters=[weight])
    store.run(0, 0)
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


def test_none_delivers_nothing():
    store, seen = WeightGradients(), []
    weight = torch.nn.Parameter(torch.zeros(2))
    keep = _count_hooks(weight, seen)
    with store.split(0, 0):
        pass
    store.defer((0, 0), lambda: [None], parameters=[weight])
    store.run(0, 0)
    assert not seen and weight.grad is None
    del keep


def test_prefetch_runs_once_and_ahead_of_the_closure_before_it():
    store, log = WeightGradients(), []
    with store.split(0, 0):
        pass
    for name in "abc":
        store.defer(
            (0, 0),
            lambda name=name: log.append(f"run {name}"),
            prefetch=lambda name=name: log.append(f"get {name}"),
        )
    store.prefetch(0, 0)
    assert log == ["get a"]
    store.run(0, 0)
    assert log == ["get a", "get b", "run a", "get c", "run b", "run c"]


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


def test_small_gradients_are_delivered_together_and_large_ones_at_once():
    store, seen = WeightGradients(), []
    small, large = (torch.nn.Parameter(torch.zeros(size)) for size in (2, _DELIVERY_BYTES // 4))
    keep = _count_hooks(small, seen), _count_hooks(large, seen)
    with store.split(0, 0):
        pass
    fired: list[int] = []

    def gradient(parameter: Tensor) -> list[Tensor]:
        fired.append(len(seen))
        return [torch.ones_like(parameter)]

    for parameter in (small, large, small):
        store.defer((0, 0), lambda parameter=parameter: gradient(parameter), parameters=[parameter])
    store.defer((0, 0), lambda: fired.append(len(seen)))
    store.run(0, 0)
    assert fired == [0, 0, 1, 1] and len(seen) == 2
    del keep


def test_delivered_gradients_are_not_copied():
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    gradient = torch.ones(4, 4)
    deliver([weight], [gradient])
    assert weight.grad is not None and weight.grad.data_ptr() == gradient.data_ptr()


def test_delivery_accumulates_and_casts():
    weight = torch.nn.Parameter(torch.zeros(2))
    deliver([weight], [torch.tensor([1.0, 2.0], dtype=torch.bfloat16)])
    deliver([weight], [torch.tensor([3.0, 4.0])])
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_delivery_fires_hooks_in_either_grad_mode(grad_mode: bool):
    seen: list[Tensor] = []
    weight = torch.nn.Parameter(torch.zeros(2))
    keep = _count_hooks(weight, seen)
    with nullcontext() if grad_mode else torch.no_grad():
        deliver([weight], [torch.ones(2)])
    assert len(seen) == 1 and seen[0].grad_fn is None
    del keep


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
