"""The arithmetic of a softmax over a vocabulary that is split over ranks.

This is the paper's algorithm with one barrier (arXiv 2411.05288): a rank computes its part of the hidden states'
gradient before it knows the other ranks' logits, relative to the largest of its own, and scales it once it does.

The label's entry is handled separately. Its logit's gradient is p - 1, for a confident token the small difference of
two numbers near 1; computed from the loss it is exact, as where a whole softmax subtracts in the logits.

Rows are tokens, (tokens, ...). Statistics are in fp32 whatever the dtype of the model, and in fp64 for fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """The vocabulary entries of one rank: the first, and how many."""

    start: int
    size: int

    def within(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which ``tokens`` are in the cut, and each one's row in it; row 0 for the others."""
        rows = tokens - self.start
        own = (rows >= 0) & (rows < self.size)
        return own, torch.where(own, rows, 0)


class Statistics(NamedTuple):
    """Statistics of a rank's logits that other ranks need, each (tokens,).

    Args:
        largest: the largest logit.
        total: the sum of all exponentials, relative to that.
        label: the label's logit; minus infinity where that is another rank's.
    """

    largest: Tensor
    total: Tensor
    label: Tensor


class Scales(NamedTuple):
    """Factors for one rank, from the statistics of all ranks, each (tokens,).

    Args:
        loss: of each token.
        own: what turns this rank's relative exponentials into probabilities.
        label: the probability of the label minus 1.
    """

    loss: Tensor
    own: Tensor
    label: Tensor


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns this rank's logits, (tokens, entries), from hidden states (tokens, hidden), in the type of statistics."""
    logits = hidden @ weight.t()
    return logits if logits.dtype is torch.float64 else logits.float()


def label_logits(logits: Tensor, labels: Tensor, cut: Cut) -> Tensor:
    """Returns each label's logit, (tokens,); minus infinity for entries of other ranks."""
    own, rows = cut.within(labels)
    gathered = logits.gather(1, rows.unsqueeze(1)).squeeze(1)
    return gathered.masked_fill_(~own, -torch.inf)


def exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    """Turns ``logits``, in place, into exponentials relative to ``largest``."""
    return logits.sub_(largest.unsqueeze(1)).exp_()


def without_labels(exponentials: Tensor, labels: Tensor, cut: Cut, value: Tensor | None = None) -> Tensor:
    """Sets ``exponentials``, in place, to zero, or to ``value`` (tokens,), at the labels that this rank has."""
    own, rows = cut.within(labels)
    rows = rows.unsqueeze(1)
    kept = exponentials.gather(1, rows).squeeze(1)
    put = torch.zeros_like(kept) if value is None else value.to(kept.dtype)
    return exponentials.scatter_(1, rows, torch.where(own, put, kept).unsqueeze(1))


def look_up(tokens: Tensor, weight: Tensor, cut: Cut, *, deterministic: bool = False) -> Tensor:
    """Returns the rows of ``tokens`` in this rank's part ``weight`` of a table, zeros for tokens of other ranks.

    With ``deterministic`` the backward always adds up in the same order, as stock does under its flag.
    """
    own, rows = cut.within(tokens)
    embedded = weight[rows] if deterministic else torch.nn.functional.embedding(rows, weight)
    return embedded.masked_fill(~own.unsqueeze(-1), 0.0)


def scales(every: Statistics, own: Tensor) -> Scales:
    """Combines the statistics of all ranks for one of them.

    Args:
        every: those of all ranks, each (ranks, tokens).
        own: the largest logit of this rank.
    """
    largest = every.largest.amax(0)
    total = (every.total * (every.largest - largest).exp_()).sum(0)
    label = every.label.amax(0)
    # A label outside the vocabulary, as of a token that does not count, gets the largest logit, as in stock.
    relative = torch.where(label == -torch.inf, 0.0, label - largest)
    loss = total.log() - relative
    return Scales(loss, (own - largest).exp_() / total, torch.expm1(-loss))


def hidden_gradient(others: Tensor, label: Tensor, own_scale: Tensor, label_scale: Tensor) -> Tensor:
    """Returns a rank's addend to the gradient of the hidden states, of the sum of all tokens' losses.

    Args:
        others: (tokens, hidden), the relative exponentials without the label's times the weight.
        label: (tokens, hidden), the label's row of the weight, zero where that is another rank's.
        own_scale, label_scale: of :class:`Scales`.
    """
    return (others * own_scale.unsqueeze(1) + label * label_scale.unsqueeze(1)).to(others.dtype)


def logits_gradient(exponentials: Tensor, labels: Tensor, cut: Cut, scale: Scales, gradient: Tensor) -> Tensor:
    """Turns ``exponentials`` (tokens, entries), without the labels', in place into the gradient of the logits.

    ``gradient``, (tokens,), is that of each token's loss.
    """
    exponentials.mul_((scale.own * gradient).unsqueeze(1))
    return without_labels(exponentials, labels, cut, scale.label * gradient)
