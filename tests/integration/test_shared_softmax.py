"""A softmax cut over ranks gives the losses and gradients of a whole one, sure tokens' too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.schedules.integration.vocabulary import arithmetic
from megatron.schedules.integration.vocabulary.arithmetic import Cut, Statistics
from tests.tolerances import assert_within, gamma, softmax_bounds

TOKENS, WORDS, HIDDEN = 7, 12, 5


def cut_over(
    ranks: int, hidden: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, the gradients of the hidden states (losses weighted by ``gradient``) and of the weight."""
    size = len(weight) // ranks
    cuts = [Cut(rank * size, size) for rank in range(ranks)]
    parts = [weight[cut.start : cut.start + size] for cut in cuts]
    made, found = [], []
    for cut, part in zip(cuts, parts, strict=True):
        logits = arithmetic.logits_of(hidden, part)
        label = arithmetic.label_logits(logits, labels, cut)
        largest = logits.amax(1)
        exponentials = arithmetic.exponentials(logits, largest)
        found.append(Statistics(largest, exponentials.sum(1), label))
        exponentials = arithmetic.without_labels(exponentials.to(part.dtype), labels, cut)
        made.append((exponentials, exponentials @ part, arithmetic.look_up(labels, part, cut)))
    every = Statistics(*map(torch.stack, zip(*found, strict=True)))
    total, weights = torch.zeros_like(hidden), []
    for cut, own, (exponentials, others, row) in zip(cuts, found, made, strict=True):
        scale = arithmetic.scales(every, own.largest)
        total += arithmetic.hidden_gradient(others, row, scale.own, scale.label)
        logits = arithmetic.logits_gradient(exponentials, labels, cut, scale, gradient)
        weights.append(logits.t() @ hidden)
    return scale.loss, total * gradient.unsqueeze(1).to(total.dtype), torch.cat(weights)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own cross entropy, in fp64."""
    hidden, weight = (each.double().requires_grad_() for each in (hidden, weight))
    losses = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    losses.backward(gradient.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    return losses.detach(), hidden.grad, weight.grad


def drawn(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = (scale * torch.randn(TOKENS, HIDDEN, generator=draw, dtype=torch.float64)).to(dtype)
    weight = torch.randn(WORDS, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    labels = torch.randint(WORDS, (TOKENS,), generator=draw)
    statistics = torch.float64 if dtype is torch.float64 else torch.float32
    return hidden, weight, labels, torch.rand(TOKENS, generator=draw, dtype=torch.float64).to(statistics)


def bounds(given: tuple[Tensor, Tensor, Tensor, Tensor], ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, _, gradient = given
    return softmax_bounds(hidden, weight, gradient, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "logits far apart"])
def test_it_is_the_cross_entropy_of_the_whole(ranks, scale):
    given = drawn(torch.float64, scale)
    for ours, theirs, bound in zip(cut_over(ranks, *given), whole(*given), bounds(given, ranks), strict=True):
        assert_within(ours, theirs, 2 * bound)  # either side is off by as much


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_numbers_of_models(dtype):
    given = drawn(dtype)
    for ours, theirs, bound in zip(cut_over(4, *given), whole(*given), bounds(given, 4), strict=True):
        assert_within(ours, theirs, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sure_token_has_its_small_gradient(dtype):
    """The label's logit stands 14 above the others: its probability is about 1 - 1e-5."""
    weight = torch.zeros(WORDS, HIDDEN, dtype=dtype)
    weight[5, 0] = 1.0
    weight[:5, 1] = weight[6:, 2] = 1.0
    hidden = torch.zeros(1, HIDDEN, dtype=dtype)
    hidden[0, 0] = 14.0
    labels, gradient = torch.tensor([5]), torch.ones(1)
    losses, hidden_gradient, weight_gradient = cut_over(4, hidden, weight, labels, gradient)
    _, hidden_whole, weight_whole = whole(hidden, weight, labels, gradient)
    assert 0 < losses.item() < 2e-5
    # The sum of exponentials is near 1, and rounded for each of them at that size. No product here is rounded.
    near_one, stored = gamma(WORDS, torch.float32), gamma(8, dtype)
    assert_within(hidden_gradient, hidden_whole, near_one + stored * hidden_whole.abs())
    assert_within(weight_gradient, weight_whole, 14.0 * near_one + stored * weight_whole.abs())
    assert 14.0 * near_one < 0.1 * weight_whole[5, 0].abs(), "a gradient of zero would pass"


def test_a_label_that_is_no_word_takes_none_apart():
    hidden, weight, labels, _ = drawn(torch.float64)
    losses, hidden_gradient, _ = cut_over(3, hidden, weight, torch.full_like(labels, -100), torch.zeros(TOKENS))
    logits = hidden @ weight.t()
    torch.testing.assert_close(losses, (logits - logits.amax(1, keepdim=True)).exp().sum(1).log())
    assert not hidden_gradient.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_are_looked_up_on_the_rank_that_has_them(deterministic):
    weight, words = torch.randn(WORDS, HIDDEN), torch.randint(WORDS, (2, 3))
    parts = [
        arithmetic.look_up(words, weight[at : at + 4], Cut(at, 4), deterministic=deterministic) for at in (0, 4, 8)
    ]
    assert torch.equal(sum(parts), weight[words])
