"""Parameters of each part of a model on one tensor-parallel rank, as Megatron builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.build import Build, Latent


class Count(NamedTuple):
    """Number of parameters: of routed experts, which have data-parallel ranks of their own, and of all else."""

    dense: float = 0.0
    expert: float = 0.0

    def plus(self, other: Count) -> Count:
        """Both together."""
        return Count(self.dense + other.dense, self.expert + other.expert)

    @property
    def all(self) -> float:
        """Of both sorts."""
        return self.dense + self.expert


@dataclass(frozen=True)
class Parameters:
    """Parameters of a whole model.

    Args:
        table: of the word embedding, and of the output layer.
        first: position embedding.
        layers: of each decoder layer.
        last: final norm.
        ahead: all layers of multi-token prediction with their own embedding.
    """

    table: Count
    first: Count
    layers: tuple[Count, ...]
    last: Count
    ahead: Count

    def by_stage(self, counts: tuple[int, ...], rank_of: tuple[int, ...], shared: bool) -> list[Count]:
        """Sums up the parameters of each rank.

        Args:
            counts: layers of each stage, in model order.
            rank_of: the rank of each stage.
            shared: whether vocabulary parallelism is on.
        """
        found = [Count()] * (max(rank_of) + 1)
        begin = 0
        for stage, (count, rank) in enumerate(zip(counts, rank_of, strict=True)):
            for layer in self.layers[begin : begin + count]:
                found[rank] = found[rank].plus(layer)
            begin += count
            if stage == 0:
                found[rank] = found[rank].plus(self.first)
            if stage == len(counts) - 1:
                found[rank] = found[rank].plus(self.last).plus(self.ahead)
        if shared:
            part = Count(2 * self.table.dense / len(found))
            return [each.plus(part) for each in found]
        # Even if tied, the first and the last stage have a copy each.
        for rank in (rank_of[0], rank_of[-1]):
            found[rank] = found[rank].plus(self.table)
        return found


def parameters(build: Build) -> Parameters:
    """Counts the parameters of ``build``."""
    shape, hidden = build.shape, build.shape.hidden
    norm = _norm(build, hidden)
    table = Count(shape.vocabulary * hidden / build.tensor)
    kinds = {experts: _layer(build, experts=experts) for experts in set(build.where)}
    layers = tuple(kinds[each] for each in build.where)
    positions = Count(float(build.positions * hidden))
    ahead = Count()
    if shape.ahead:
        ahead = ahead.plus(table).plus(positions)
        joined = 2.0 * hidden * hidden / build.tensor
        for _ in range(shape.ahead):
            ahead = ahead.plus(layers[-1]).plus(Count(joined + 3 * norm))
    return Parameters(table, positions, layers, Count(norm), ahead)


def _norm(build: Build, width: int) -> float:
    return (2.0 if build.two_norms else 1.0) * width


def _layer(build: Build, *, experts: bool) -> Count:
    hidden = build.shape.hidden
    both_norms = 2 * _norm(build, hidden)
    attention = _attention(build) if build.shape.latent is None else _latent(build, build.shape.latent)
    feed_forward = (
        _experts(build) if experts else Count(_feed_forward(build, build.shape.inner or 4 * hidden, build.tensor))
    )
    return Count(both_norms + attention).plus(feed_forward)


def _attention(build: Build) -> float:
    hidden, queries = build.shape.hidden, build.queries / build.tensor
    into = queries + 2 * build.groups * build.head
    biases = (into if build.biases or build.attention_biases else 0.0) + (hidden if build.biases else 0.0)
    norms = 2 * _norm(build, build.head) if build.head_norms else 0.0
    return hidden * into + queries * hidden + biases + norms


def _latent(build: Build, latent: Latent) -> float:
    """Down-projections are whole on every tensor-parallel rank."""
    hidden, heads = build.shape.hidden, build.shape.heads / build.tensor
    each = latent.head + latent.position
    queries = hidden * heads * each if latent.query is None else latent.query * (hidden + heads * each)
    keys = hidden * (latent.key_value + latent.position) + latent.key_value * heads * (latent.head + latent.value)
    norms = _norm(build, (latent.query or 0) + latent.key_value) if build.head_norms else 0.0
    return queries + keys + heads * latent.value * hidden + norms + (hidden if build.biases else 0.0)


def _feed_forward(build: Build, inner: int, tensor: int) -> float:
    hidden, wide = build.shape.hidden, (2 if build.shape.gated else 1) * inner / tensor
    biases = wide + hidden if build.biases else 0.0
    return hidden * wide + inner / tensor * hidden + biases


def _experts(build: Build) -> Count:
    found = build.shape.experts
    assert found is not None, "the layer has experts"
    hidden = build.shape.hidden
    dense = float(hidden * build.experts)  # the router
    if found.shared:
        dense += _feed_forward(build, found.shared, build.tensor) + (hidden if build.shared_gate else 0.0)
    return Count(dense, found.number * _feed_forward(build, found.inner, build.expert_tensor))
