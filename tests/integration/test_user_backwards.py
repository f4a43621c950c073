"""A forward, a loss or a hook that runs a backward of its own gets, and leaves, what it gets without a split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import split_helpers as helpers
import torch
from fused_kernels import fused_kernels
from split_helpers import SEVERAL_I_AHEAD, TOGETHER
from split_te_helpers import Block, compare, tensor_parallel
from torch import Tensor

from tests.integration.server import Megatron

grad = torch.autograd.grad


def _again(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A forward from a leaf of its own, and that leaf."""
    y = x.detach().requires_grad_()
    with torch.enable_grad():
        return module(y).square().sum(), y


def adversarial_step(module: Any, x: Tensor) -> Tensor:
    return module(x + 0.1 * grad(*_again(module, x))[0])


def whole_backward_in_a_forward(module: Any, x: Tensor) -> Tensor:
    loss, y = _again(module, x)
    loss.backward()
    assert y.grad is not None
    return module(x + 0.1 * y.grad)


def gradient_penalty(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    return output + grad(output.square().sum(), x, create_graph=True)[0].square().sum()


def penalty_at_a_weight(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    return output + grad(output.square().sum(), module.up.weight, create_graph=True)[0].square().mean()


def two_losses_at_weights(module: Any, x: Tensor) -> Tensor:
    output, asked = module(x), (module.up.weight, module.down.weight)
    norms = [
        sum(each.norm() for each in grad(loss, asked, retain_graph=True)) for loss in (output.mean(), output.std())
    ]
    return output * (norms[0] / norms[1])


def weights_that_may_be_unused(module: Any, x: Tensor) -> Tensor:
    output, other = module(x), torch.zeros(3, requires_grad=True)
    asked = [other, module.up.weight, x]
    found = grad(output.sum(), asked, retain_graph=True, allow_unused=True)
    assert found[0] is None
    zeros = grad(output.sum(), asked, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
    with pytest.raises(RuntimeError):
        grad(output.sum(), other, retain_graph=True)
    return output * (found[1].norm() + found[2].norm() + zeros.norm())


def several_gradients_at_once(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    rows = torch.eye(2, device=x.device)
    both = torch.stack([output.sum(), output.square().sum()])
    (found,) = grad(both, module.down.weight, rows, retain_graph=True, is_grads_batched=True)
    return output * found.norm(dim=(1, 2)).sum()


def backward_into_chosen_weights(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    output.square().sum().backward(inputs=[module.down.weight, module.up.weight], retain_graph=True)
    return output


def hook_with_a_step_of_its_own(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    output.register_hook(lambda gradient: gradient * grad(*_again(module, x))[0].norm())
    return output


def hook_that_asks_for_a_weights_gradient(module: Any, x: Tensor) -> Tensor:
    output = module(x)
    output.register_hook(lambda gradient: gradient * grad(_again(module, x)[0], module.up.weight)[0].norm())
    return output


def a_weights_own_hook(module: Any, x: Tensor) -> Tensor:
    handle = module.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    try:
        return two_losses_at_weights(module, x)
    finally:
        handle.remove()


ACTIVATIONS = (adversarial_step, whole_backward_in_a_forward, hook_with_a_step_of_its_own)
WEIGHTS = (
    two_losses_at_weights,
    weights_that_may_be_unused,
    several_gradients_at_once,
    backward_into_chosen_weights,
    hook_that_asks_for_a_weights_gradient,
    a_weights_own_hook,
)
TWICE = (gradient_penalty, penalty_at_a_weight)
# These add to gradients in F. Sums have stock's order where microbatches come one after another.
ADDING = (whole_backward_in_a_forward, backward_into_chosen_weights)


def _order(forward: Any) -> str:
    return TOGETHER if forward in ADDING else SEVERAL_I_AHEAD


def _local(forwards: tuple[Any, ...], sequence_parallel: bool = False) -> dict[str, str]:
    def check_of(forward: Any) -> Callable[[], None]:
        def check() -> None:
            model = helpers.block(sequence_parallel=sequence_parallel)
            helpers.compare(model, _order(forward), forward=forward, once=False)

        check.__name__ = forward.__name__
        return check

    return helpers.failures_of([check_of(forward) for forward in forwards])


@pytest.fixture(scope="module")
def failures(megatron: Megatron) -> dict[str, str]:
    found: dict[str, str] = megatron("in_groups", 1, _local, ACTIVATIONS + WEIGHTS + TWICE)[0]
    return found


@pytest.mark.job
@pytest.mark.parametrize("forward", [each.__name__ for each in ACTIVATIONS + WEIGHTS + TWICE])
def test_gradients_are_stocks_with(forward: str, failures: dict[str, str]) -> None:
    assert forward not in failures, failures[forward]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_stocks_under_tensor_parallelism(megatron: Megatron, sequence_parallel: bool) -> None:
    # No message can be batched.
    forwards = tuple(each for each in ACTIVATIONS + WEIGHTS if each is not several_gradients_at_once)
    for failures in megatron("in_groups", 2, _local, forwards, sequence_parallel, tensor_model_parallel_size=2):
        assert not failures, failures


def _fused() -> None:
    """Stock's own kernels add to ``main_grad`` in every backward, whatever it asks for."""
    for forward, te in itertools.product(ACTIVATIONS, (False, True)):
        if te and forward is hook_with_a_step_of_its_own:
            continue  # without a split the first microbatch overwrites what the hook has added
        with fused_kernels():
            if te:
                model = Block(params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
                compare(model, TOGETHER, forward=forward, once=False)
            else:
                model = helpers.block(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
                helpers.compare(model, TOGETHER, forward=forward, once=False)


def test_gradients_are_stocks_under_fused_accumulation(te: Megatron) -> None:
    te("in_groups", 1, _fused)


def _te(sequence_parallel: bool) -> None:
    settings = tensor_parallel() | {"sequence_parallel": sequence_parallel}
    # Its newest versions free in a backward what a second one would need.
    for forward, bias in itertools.product((*ACTIVATIONS, hook_that_asks_for_a_weights_gradient), (False, True)):
        compare(Block(bias=bias, **settings), _order(forward), forward=forward, once=False)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_gradients_of_transformer_engines_linears_are_its_own(te: Megatron, tp: int, sequence_parallel: bool) -> None:
    te("in_groups", tp, _te, sequence_parallel, tensor_model_parallel_size=tp)
