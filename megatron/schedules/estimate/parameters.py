"""Parameters of each part of a model on one tensor-parallel rank, as Megatron builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.build import Build, LayerKind
from megatron.schedules.estimate.work import LinearShape, layer_work


class Count(NamedTuple):
    """Number of parameters.

    Args:
        dense: those without the next.
        expert: those of routed experts, which have their own data-parallel ranks.
        quantized: those of both that have copies in FP8.
        primary: those that are stored in FP8 only.
    """

    dense: float = 0.0
    expert: float = 0.0
    quantized: float = 0.0
    primary: float = 0.0

    def plus(self, other: Count) -> Count:
        """Sum of both."""
        return Count(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def all(self) -> float:
        """All parameters, each once."""
        return self.dense + self.expert


@dataclass(frozen=True)
class Parameters:
    """Parameters of a whole model.

    Args:
        table: parameters of the word embedding, and of the output layer.
        first: position embedding.
        layers: each decoder layer.
        last: final norm, and the copies of the output layer if it is quantized.
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
            shared: true under vocabulary parallelism.
        """
        of_ranks = [Count()] * (max(rank_of) + 1)
        begin = 0
        for stage, (count, rank) in enumerate(zip(counts, rank_of, strict=True)):
            for layer in self.layers[begin : begin + count]:
                of_ranks[rank] = of_ranks[rank].plus(layer)
            begin += count
            if stage == 0:
                of_ranks[rank] = of_ranks[rank].plus(self.first)
            if stage == len(counts) - 1:
                of_ranks[rank] = of_ranks[rank].plus(self.last).plus(self.ahead)
        if shared:
            part = Count(2 * self.table.dense / len(of_ranks))
            return [rank.plus(part) for rank in of_ranks]
        # Even if tied, the first and the last stage have a copy each.
        for rank in (rank_of[0], rank_of[-1]):
            of_ranks[rank] = of_ranks[rank].plus(self.table)
        return of_ranks


def parameters(build: Build) -> Parameters:
    """Counts the parameters of ``build``."""
    shape, hidden = build.shape, build.shape.hidden
    norm = _norm(build, hidden)
    table = Count(shape.vocabulary * hidden / build.tensor)
    kinds = {kind: _layer(build, kind) for kind in {*build.kinds, build.kind_ahead}}
    positions = Count(float(build.positions * hidden))
    ahead = Count()
    if shape.ahead:
        ahead = ahead.plus(table).plus(positions)
        joined = 2.0 * hidden * hidden / build.tensor
        for _ in range(shape.ahead):
            ahead = ahead.plus(kinds[build.kind_ahead])
            ahead = ahead.plus(_counted(build, build.kind_ahead, Count(joined + 3 * norm), joined))
    last = Count(norm, quantized=table.all if build.output_quantized else 0.0)
    return Parameters(table, positions, tuple(kinds[kind] for kind in build.kinds), last, ahead)


def _norm(build: Build, width: int) -> float:
    return (2.0 if build.two_norms else 1.0) * width


def _layer(build: Build, kind: LayerKind) -> Count:
    hidden, work = build.shape.hidden, layer_work(build, experts=kind.experts)
    linears = _weights((*work.attention, *work.mlp))
    into, out = work.attention[0], work.attention[-1]
    dense = 2 * _norm(build, hidden) + _weights(work.attention) + (out.out if build.biases else 0.0)
    if build.shape.latent is None:
        dense += into.out if build.biases or build.attention_biases else 0.0
        dense += 2 * _norm(build, build.head) if build.head_norms else 0.0
    elif build.head_norms:
        dense += _norm(build, (build.shape.latent.query or 0) + build.shape.latent.key_value)
    if not kind.experts:
        return _counted(build, kind, Count(dense + _mlp(build, work.mlp)), linears)
    routed, shared = work.mlp[:2], work.mlp[2:]
    dense += hidden * build.experts  # the router
    if shared:
        dense += _mlp(build, shared) + (hidden if build.shared_gate else 0.0)
    return _counted(build, kind, Count(dense, _mlp(build, routed)), linears)


def _counted(build: Build, kind: LayerKind, count: Count, linears: float) -> Count:
    """Adds how the weights of ``linears`` in ``count`` are stored."""
    if not kind.quantized or build.quantized is None:
        return count
    return count._replace(quantized=linears, primary=linears if build.quantized.primary else 0.0)


def _weights(linears: Sequence[LinearShape]) -> float:
    return sum(linear.parts * linear.inner * linear.out for linear in linears)


def _mlp(build: Build, linears: Sequence[LinearShape]) -> float:
    biases = sum(linear.parts * linear.out for linear in linears) if build.biases else 0.0
    return _weights(linears) + biases
