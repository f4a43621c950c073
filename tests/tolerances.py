"""How far two floating-point results of the same mathematics may be apart, derived from the arithmetic.

The instruction set, the libraries and the number of threads decide in which order a sum is taken, and whether a product
is rounded before it is added. A tolerance that was found by trying holds on the machine where it was tried. Those here
hold for every order. Each follows from the unit roundoff u (half of the type's epsilon) and from the number of
roundings:

- Worst case (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.1 and 4.2): a sum of n terms, or of n
  products, taken in any order, is off by at most gamma(n) = nu / (1 - nu) times the sum of its terms' magnitudes. Two
  such sums are at most twice that apart. Used where the terms are known, or few.
- Independent roundings (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019): a chain of n roundings is off by more than
  CONFIDENCE * sqrt(n) * u, relatively, with a probability of 2 exp(-CONFIDENCE**2 / 2). Used for whole models, whose
  worst case says nothing. The error is relative to the largest number of the tensor, since errors of small elements
  come from large ones.

Tests that claim equality to the bit do not come here: both sides call the same kernels on the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

CONFIDENCE = 6.0
"""Of independent roundings: one bound in 30 million is exceeded."""


def gamma(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error of a product of ``roundings`` factors 1 + delta, each delta at most u."""
    off = roundings * torch.finfo(dtype).eps / 2
    assert off < 0.1, f"{roundings} roundings of {dtype} have no useful worst case"
    return off / (1 - off)


def likely(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative error of a chain of ``roundings`` that are independent of each other."""
    return CONFIDENCE * math.sqrt(roundings) * torch.finfo(dtype).eps / 2


def orders_apart(terms: Sequence[Tensor]) -> Tensor:
    """How far two sums of the same ``terms``, taken in different orders, may be apart, for each element."""
    magnitudes = torch.stack([term.double().abs() for term in terms]).sum(0)
    return 2 * gamma(len(terms) - 1, terms[0].dtype) * magnitudes


def assert_within(found: Tensor, expected: Tensor, bound: Tensor | float, name: str = "") -> None:
    """Fails unless no element of ``found`` is farther from ``expected`` than its ``bound``."""
    assert found.shape == expected.shape, name
    apart = (found.double() - expected.double()).abs()
    allowed = torch.as_tensor(bound, dtype=torch.float64).expand_as(apart)
    # Not `apart > allowed`: that would let NaN through.
    worst = int((apart / allowed.clamp_min(torch.finfo(torch.float64).tiny)).argmax()) if apart.numel() else 0
    assert bool((apart <= allowed).all()), (
        f"{name}: {int((~(apart <= allowed)).sum())} of {apart.numel()} elements are too far apart; the worst by "
        f"{apart.flatten()[worst]:.3g}, where rounding explains {allowed.flatten()[worst]:.3g}"
    )


def assert_near(found: Tensor, expected: Tensor, relative: float, name: str = "") -> None:
    """Fails unless ``found`` is within ``relative`` of the largest magnitude in ``expected``."""
    assert_within(found, expected, relative * float(expected.abs().max()) if expected.numel() else 0.0, name)


# --- a softmax over words -----------------------------------------------------------------------------------------


def softmax_bounds(hidden: Tensor, weight: Tensor, gradient: Tensor, ranks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """How far the results of an output layer and its cross entropy may be from the exact ones, for each element.

    A logit is off by d <= gamma(hidden) * sum |h w|, whatever the order of its sum. With logits off by d, the loss is
    off by 2 d at most and a probability by a factor of exp(2 d), for all logits may move in the least favourable way.
    The exponentials, their sum over words and ranks, and the logarithm add roundings of their own. What is multiplied
    by probabilities has their error, and that of one more sum. Products are summed in fp32 at least; numbers of fewer
    bits are rounded when they are stored.

    Args:
        hidden: (tokens, hidden), as it is given.
        weight: (words, hidden), in the same type.
        gradient: (tokens,), of each token's loss.
        ranks: over how many the words are cut.

    Returns:
        Of the losses (tokens,), of the gradients of ``hidden`` and of ``weight``.
    """
    stored, (tokens, words) = hidden.dtype, (len(hidden), len(weight))
    summed = torch.float64 if stored is torch.float64 else torch.float32
    exact, table, each = hidden.double(), weight.double(), gradient.double().abs()
    logits = exact @ table.t()
    sums = gamma(hidden.shape[1], summed) * (exact.abs() @ table.abs().t())
    off = (sums + gamma(1, stored) * logits.abs()).amax(1)
    # Logits relative to the largest, exponentials, sums over a rank's words and over ranks, rescaling, logarithm.
    range_ = logits.amax(1) - logits.amin(1)
    of_loss = 2 * off + gamma(words + ranks + 6, summed) * (1 + math.log(words) + range_)
    # Exponentials are stored, their product with the weight too, and the sum that each rank adds to.
    of_factor = torch.expm1(2 * off) + of_loss + gamma(ranks + 4, stored)
    probability = torch.softmax(logits, 1)
    # The label's word counts with p - 1, whose error is relative to 1.
    of_hidden = (of_factor + gamma(words, summed)) * each
    of_hidden = of_hidden[:, None] * (probability @ table.abs() + table.abs().amax(0))
    of_weight = (of_factor + gamma(tokens, summed)) * each
    return of_loss, of_hidden, (probability + 1).t() @ (of_weight[:, None] * exact.abs())


# --- training jobs of the tests' small model ----------------------------------------------------------------------

_LAYERS, _HIDDEN, _HEAD, _SEQUENCE, _WORDS = 8, 32, 8, 16, 96
"""Sizes of tests/integration/results.py's model; some tests have up to twice the layers."""
_LAYER = 2 * _HIDDEN + (_HIDDEN + _HEAD + 2 * _SEQUENCE + _HIDDEN) + (_HIDDEN + 4 * _HIDDEN)
"""Roundings one after another in a layer: two norms; query, scores, softmax, context, projection; the two of an MLP."""
_FORWARD = 2 * _LAYERS * _LAYER + 2 * _HIDDEN + _WORDS
"""In a forward: the layers, the last norm, the output layer, and a token's loss."""
_BACKWARD = 3 * _FORWARD
"""In a gradient: the forward, and twice as many in the backward; what sums tokens and microbatches is among those."""
_SUMMED = 32
"""Losses and gradients that are added up over microbatches and ranks, at most; copies of tied weights count twice."""
_PARAMETERS = 2**18

SAME_KERNELS = 2 * gamma(_SUMMED)
"""Relative, of the losses of two jobs that call the same kernels, but add microbatches and ranks in another order."""
OTHER_KERNELS = 2 * likely(_FORWARD)
"""Relative, of the losses of two jobs that cut matrices, sequences or words differently, and so call other kernels."""
FEWER_BITS = CONFIDENCE * torch.finfo(torch.bfloat16).eps / 2 * 0.02 * 2.0
"""Of losses in bf16 or fp16, absolute: each weight may be rounded up in one job and down in the other, independently
of the rest. That moves a loss by the product of u, the weights' size (they start from a deviation of 0.02) and the
gradient's norm (2 at most)."""


def other_sums(dtype: torch.dtype = torch.float32) -> float:
    """Of gradients whose parts are added in another order, relative to the largest element.

    The worst case is relative to the sum of the parts' magnitudes. Parts whose signs are independent add up to the
    square root of their number, while their magnitudes add up to that number.
    """
    return 2 * gamma(_SUMMED, dtype) * math.sqrt(_SUMMED)


def other_gradients(dtype: torch.dtype = torch.float32) -> float:
    """Of gradients that other kernels gave, relative to the largest element."""
    return 2 * likely(_BACKWARD, dtype)


def losses(expected: Sequence[float], relative: float = SAME_KERNELS) -> Any:
    """The losses of a job in fp32, to be compared with another's by ``==``."""
    return pytest.approx(list(expected), rel=relative, abs=0)


Parameters = Mapping[tuple[str, int, int], Tensor]


def assert_gradients(
    ours: Parameters, stock: Parameters, relative: Callable[[torch.dtype], float] = other_sums
) -> None:
    """Fails unless each gradient is as near as ``relative`` says of its type."""
    assert ours.keys() == stock.keys() and stock
    for key, expected in stock.items():
        finite = expected.isfinite()  # a loss scale that is too large overflows on both sides
        torch.testing.assert_close(ours[key][~finite], expected[~finite], equal_nan=True, msg=str(key))
        assert_near(ours[key][finite], expected[finite], relative(expected.dtype), str(key))


def assert_weights(ours: Parameters, stock: Parameters, gradients: Parameters, rate: float, iterations: int) -> None:
    """Fails unless weights are as near to each other as Adam leaves them where gradients were summed in other orders.

    Adam divides a gradient by its own size. Where a gradient g is off by e, each of K steps differs by 2 K e / |g|
    learning rates at most, for the root of the mean square is |g| / sqrt(K) at least. An element whose gradient is
    nothing but rounding error may step either way. So single elements may be far apart on some machine, but not many:
    what is bounded is the mean over each parameter. Weights that lack a row or a step miss it by far.

    Args:
        ours, stock: the weights at the end.
        gradients: stock's of the first iteration. Under the distributed optimizer some are of one rank's samples
            only: about as large as the whole, which is what matters here.
        rate: the learning rate at most.
        iterations: steps of the optimizer at most.
    """
    assert ours.keys() == stock.keys() and stock
    clipped = likely(_PARAMETERS)  # the norm that clips is a sum over all parameters, and scales every gradient
    for key, expected in stock.items():
        apart = (ours[key].double() - expected.double()).abs().mean()
        off = clipped + _steps_off(gradients[key])
        stored = torch.finfo(expected.dtype).eps * expected.double().abs().mean()
        allowed = 2 * rate * iterations**2 * off + iterations * stored
        assert bool(apart <= allowed), f"{key}: weights are {apart:.3g} apart in the mean, not {allowed:.3g}"


def _steps_off(gradient: Tensor) -> float:
    """The mean of e / |g|, at most 1, over the elements that have a gradient."""
    off, size = other_sums(gradient.dtype), gradient.double().abs()
    if not bool(size.isfinite().all()):
        return off * (1 - math.log(off))  # it overflowed; that is the mean where all sizes are as frequent
    size = size[size > 0]
    return float((off * size.max() / size).clamp_max(1.0).mean()) if size.numel() else 0.0
