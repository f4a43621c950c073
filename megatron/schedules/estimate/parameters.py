"""Parameters of each part of a model on one tensor-parallel rank, as Megatron builds it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import Count, norm_parameters
from megatron.schedules.estimate.symbols import layer_parameters, stored


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
            part = Count(*(2 * number / len(of_ranks) for number in self.table))
            return [rank.plus(part) for rank in of_ranks]
        # Even if tied, the first and the last stage have a copy each.
        for rank in (rank_of[0], rank_of[-1]):
            of_ranks[rank] = of_ranks[rank].plus(self.table)
        return of_ranks


def parameters(build: Build) -> Parameters:
    """Counts the parameters of ``build``."""
    shape, hidden = build.shape, build.shape.hidden
    norm = norm_parameters(build, hidden)
    table = Count(shape.vocabulary * hidden / build.tensor).under(build.adapters)
    kinds = {kind: layer_parameters(build, kind) for kind in {*build.kinds, *build.kinds_ahead}}
    positions = Count(float(build.positions * hidden)).under(build.adapters)
    ahead = Count()
    if shape.ahead:
        ahead = ahead.plus(table).plus(positions)
        joined = 2.0 * hidden * hidden / build.tensor
        for kind in build.kinds_ahead:
            ahead = ahead.plus(kinds[kind])
            ahead = ahead.plus(stored(build, kind, Count(joined + 3 * norm), joined).under(build.adapters))
    last = Count(norm, quantized=table.all if build.output_quantized else 0.0).under(build.adapters)
    return Parameters(table, positions, tuple(kinds[kind] for kind in build.kinds), last, ahead)
