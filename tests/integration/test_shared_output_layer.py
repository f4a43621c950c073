"""One rank's part of the output layer alone: S, what statistics make of it, and T, as a whole layer would have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import split_helpers as helpers
import torch
from fused_kernels import fused_kernels

from megatron.schedules.runtime.activation_meter import ActivationMeter
from tests.tolerances import assert_within, softmax_bounds

SEQUENCE, BATCH, HIDDEN, WORDS = 6, 2, 8, 12


def _whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, each: torch.Tensor) -> Any:
    """Losses and both gradients by torch's own cross entropy."""
    hidden, weight = hidden.clone().requires_grad_(), weight.detach().clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(hidden.flatten(0, 1) @ weight.t(), labels, reduction="none")
    losses.backward(each)
    assert hidden.grad is not None
    return losses.detach(), hidden.grad, weight.grad


def _through(fused: bool, sequence_parallel: bool, trained: bool = True) -> None:
    """One pipeline rank, and one or two tensor-parallel ones with a part each."""
    from megatron.core import parallel_state

    from megatron.schedules.integration.vocabulary import arithmetic
    from megatron.schedules.integration.vocabulary.arithmetic import Statistics
    from megatron.schedules.integration.vocabulary.output import OutputLayer
    from megatron.schedules.integration.vocabulary.parts import OutputPart

    tensor = parallel_state.get_tensor_model_parallel_group()
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw)
    table = torch.randn(WORDS, HIDDEN, generator=draw)
    labels = torch.randint(WORDS, (SEQUENCE * BATCH,), generator=draw)
    each = torch.rand(SEQUENCE * BATCH, generator=draw)
    losses, hidden_gradient, weight_gradient = _whole(hidden, table, labels, each)
    # Both sides are in fp32, and off by as much.
    of_losses, of_hidden, of_weight = (2 * bound for bound in softmax_bounds(hidden.flatten(0, 1), table, each))

    rank, size = tensor.rank(), tensor.size()
    part = OutputPart(torch.nn.Parameter(table.chunk(size)[rank].clone(), requires_grad=trained), tied=False)
    hooks = helpers.MainGrads(part, torch.float32)
    meter = ActivationMeter([part.weight])
    config = SimpleNamespace(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused)
    layer = OutputLayer(part, config, backward=True, meter=meter)
    given = hidden.chunk(size)[rank].clone() if sequence_parallel else hidden

    made = layer.forward(0, given, labels)
    scale = arithmetic.scales(Statistics(*(value.unsqueeze(0) for value in made.statistics)), made.statistics.largest)
    assert_within(scale.loss, losses, of_losses)
    assert made.addends is not None
    total = arithmetic.hidden_gradient(*made.addends, layer.own(scale.own), layer.own(scale.label))
    total = total * layer.own(each).unsqueeze(1)
    expected, bound = hidden_gradient, of_hidden.view_as(hidden)
    if sequence_parallel:
        expected, bound = expected.chunk(size)[rank], bound.chunk(size)[rank]
    assert_within(total.view_as(given), expected, bound)
    assert made.hold is not None
    made.hold.release()
    if not trained:
        assert meter.current == 0
        return
    assert meter.current == 4 * (WORDS // size * SEQUENCE * BATCH + given.numel())
    layer.weight_gradient(1, 0, scale, each)
    assert meter.current == 0
    assert hooks.fired == {"weight": 1}
    assert_within(part.weight.main_grad, weight_gradient.chunk(size)[rank], of_weight.chunk(size)[rank])


def _plain() -> None:
    _through(fused=False, sequence_parallel=False)


def _parallel() -> None:
    _through(fused=False, sequence_parallel=True)


def _fused() -> None:
    with fused_kernels() as kernels:
        _through(fused=True, sequence_parallel=False)
    assert kernels.calls == {"fp32": 1, "fp16": 0}


def _frozen() -> None:
    _through(fused=False, sequence_parallel=False, trained=False)


@pytest.mark.parametrize(("body", "size"), [(_plain, 1), (_plain, 2), (_parallel, 2), (_fused, 1), (_frozen, 1)])
def test_a_part_of_the_output_layer(body: Any, size: int):
    helpers.run_ranks(size, body, tensor_model_parallel_size=size)
