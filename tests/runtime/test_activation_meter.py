"""The activation meter counts what is really held: each storage once, from the save to the release."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.schedules.runtime.activation_meter import ActivationMeter

FLOAT = 4


@pytest.fixture(autouse=True)
def _by_reference_counts_alone():
    """Releases must not wait for the garbage collector."""
    gc.disable()
    yield
    gc.enable()


def test_counts_from_save_to_release():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.recording():
        y = (x * 2).exp().tanh()
    assert meter.current == meter.peak == 2 * 100 * FLOAT
    y.sum().backward()
    assert meter.current == 0
    assert meter.peak == 2 * 100 * FLOAT


def test_a_dropped_graph_releases_without_a_backward():
    meter = ActivationMeter()
    with meter.recording():
        y = torch.randn(10, requires_grad=True).exp()
    assert meter.current == 10 * FLOAT
    del y
    assert meter.current == 0


def test_views_count_once_and_with_their_whole_storage():
    meter = ActivationMeter()
    base = torch.randn(64, 8)
    first = torch.randn(16, requires_grad=True)
    with meter.recording():
        y = base.view(-1)[:16] * first + base[2:4].reshape(16) * first
    assert meter.current == 64 * 8 * FLOAT
    del y
    assert meter.current == 0


def test_parameters_and_buffers_are_left_out_even_after_they_moved():
    model = torch.nn.Linear(8, 8)
    meter = ActivationMeter([*model.parameters(), *model.buffers()])
    model.weight.data = torch.zeros(100)[36:].view(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with meter.recording():
        y = model(x)
    assert meter.current == 4 * 8 * FLOAT
    del y


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradient * weight, gradient * x


def test_custom_functions_are_counted():
    weight = torch.nn.Parameter(torch.ones(50))
    meter = ActivationMeter([weight])
    with meter.recording():
        y = _Squared.apply(torch.randn(50, requires_grad=True), weight)
    assert meter.current == 2 * 50 * FLOAT
    y.sum().backward()
    assert meter.current == 0


def test_gradients_are_the_same_to_the_second_order():
    def once_and_twice() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 7, requires_grad=True)
        y = ((x * 2).exp().tanh() * x).sum()
        (once,) = torch.autograd.grad(y, x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
        return once.detach(), twice

    meter = ActivationMeter()
    plain = once_and_twice()
    with meter.recording():
        metered = once_and_twice()
    assert all(map(torch.equal, plain, metered))
    assert meter.current == 0


def test_a_write_to_a_saved_tensor_is_still_an_error():
    x = torch.randn(3, requires_grad=True)
    with ActivationMeter().recording():
        y = x * 2
        z = y.exp() * y
        y.mul_(3)
    with pytest.raises(RuntimeError, match="modified in place"):
        z.sum().backward()


def test_recomputed_activations_are_counted_while_they_live():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.recording():
        y = checkpoint(lambda t: t.exp().tanh(), x, use_reentrant=True)
    assert meter.peak == 100 * FLOAT
    with meter.recording():
        y.sum().backward()
    assert meter.peak == 3 * 100 * FLOAT
    assert meter.current == 0


def test_discarded_outputs_do_not_count():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.recording():
        y = x.exp()
        y.untyped_storage().resize_(0)
        z = x.sin()
    assert meter.current == 100 * FLOAT
    assert meter.peak == 100 * FLOAT
    del y, z


def test_hold_shares_storages_with_the_graph():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.recording():
        y = x.exp()
    hold = meter.hold([y, torch.zeros(10)])
    assert meter.current == 110 * FLOAT
    y.sum().backward()
    assert meter.current == 110 * FLOAT
    hold.release()
    hold.release()
    assert meter.current == 0


def test_the_peak_stays_when_memory_is_released():
    meter = ActivationMeter()
    hold = meter.hold([torch.zeros(100)])
    meter.hold([torch.zeros(100)]).release()
    hold.release()
    assert meter.peak == 800 and meter.current == 0


def test_nothing_is_counted_outside_or_for_sparse_tensors():
    meter = ActivationMeter()
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    assert meter.current == 0
    meter.hold([torch.eye(4).to_sparse()])
    assert meter.current == 0
    y.sum().backward()
