"""Sparse attention (``D``): DeepSeek's, on absorbed latent attention, with an indexer that chooses what a token sees.

Its kernels (``--dsa-kernel-backend``) run on no CPU, and no job on a GPU has measured these estimates. What they keep
is read from what ``SparseMLA`` and ``IndexerFunction`` of Megatron's ``experimental_attention_variant/ops`` save.
Without them Megatron keeps the scores of all tokens: that, and all else, was counted in jobs on a CPU.
"""

from __future__ import annotations

from megatron.schedules.estimate.attention import latent_linears, latent_of, latent_parameters
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import (
    SINGLE,
    Count,
    Kept,
    Layer,
    LinearShape,
    PartWork,
    Symbol,
    around,
    around_part,
    for_rows,
    into_linear,
    weights,
)
from megatron.schedules.estimate.shape import Indexer

# The backward computes the scores again, as that of fused attention does.
_BACKWARD = 2.5
# Bytes of a chosen token's number.
_PLACE = 4.0


def _indexer(build: Build) -> Indexer:
    assert build.shape.indexer is not None, "a layer has sparse attention"
    return build.shape.indexer


def _of_indexer(build: Build) -> tuple[LinearShape, ...]:
    """Linears of the indexer: each tensor-parallel rank has them whole."""
    indexer, hidden = _indexer(build), build.shape.hidden
    queries = latent_of(build).query or hidden
    return (
        LinearShape(queries, indexer.heads * indexer.head),
        LinearShape(hidden, indexer.head),
        LinearShape(hidden, indexer.heads),
    )


def _seen(build: Build) -> float:
    """Tokens that a token attends to, on average. Without sparse kernels it computes the scores of all."""
    chosen, sequence = _indexer(build).chosen, build.shape.sequence
    if not _indexer(build).kernels:
        return float(sequence)
    return sequence / 2 if chosen >= sequence else chosen * (1 - chosen / (2 * sequence))


def _work(build: Build) -> PartWork:
    """Keys and values are never projected up: queries are projected down, and what they find is projected up.

    The first linear of the indexer's scores sees all tokens before it. Only a loss trains it.
    """
    latent, indexer, heads = latent_of(build), _indexer(build), build.shape.heads / build.tensor
    absorbed = 2.0 * heads * latent.key_value * (latent.head + latent.value)
    attended = 2.0 * heads * (2 * latent.key_value + latent.position) * _seen(build)
    chosen_by = float(indexer.heads * indexer.head * build.shape.sequence)
    *linears, _, out = latent_linears(build)
    learned = _of_indexer(build) if indexer.trained else ()
    untrained = 0.0 if indexer.trained else sum(linear.flops for linear in _of_indexer(build))
    return PartWork(
        (*linears, out, *learned),
        scores=(chosen_by, 2 * chosen_by if indexer.trained else 0.0),
        # Gradients of the absorbed weights are computed in I.
        scan=(absorbed + attended + untrained, 2 * absorbed + _BACKWARD * attended),
        moved=(around(build), around(build)),
        modules={"core_attn": (0.0, chosen_by + attended)},
    )


def _parameters(build: Build) -> Count:
    norm = 2 * _indexer(build).head  # of its keys, with a shift
    return latent_parameters(build).plus(Count(weights(_of_indexer(build)) + norm))


def _activations(build: Build, operand: float) -> Layer:
    latent, indexer, number = latent_of(build), _indexer(build), build.number
    heads = build.shape.heads / build.tensor
    queries, values = heads * (latent.head + latent.position), heads * latent.value
    squeezed = latent.query or 0
    keys = latent.key_value + latent.position
    # Projected queries are absorbed into others as wide as keys. The sums of keys are projected up to values.
    inside = squeezed + queries + heads * latent.key_value + values
    if build.head_norms:
        inside += squeezed + keys
    learned = 0.0
    if indexer.trained:
        learned = number * (2 * indexer.heads * indexer.head + 3 * indexer.head + indexer.heads)
    weights_kept = operand * (squeezed + queries + squeezed + keys) + for_rows(build, operand, values)
    core = _fused if build.shape.fused and indexer.kernels else _unfused
    return {
        **around_part(build, into_linear(build, operand)),
        "core_attn": Kept(core(build, heads, keys)),
        "attention": Kept(number * inside + learned, weights_kept),
    }


def _fused(build: Build, heads: float, keys: int) -> float:
    """Bytes of absorbed queries, of keys, and of the places of the chosen tokens."""
    return build.number * (heads * keys + keys) + _PLACE * min(_indexer(build).chosen, build.shape.sequence)


def _unfused(build: Build, heads: float, keys: int) -> float:
    """Bytes without sparse kernels: the softmax of all tokens' scores, its masks, and queries and keys in full.

    Several samples have a copy of the keys for each head.
    """
    copies = heads if build.samples > 1 else 1.0
    scores = (3.0 + 2 * SINGLE + build.number) * heads * build.shape.sequence
    values = latent_of(build).key_value if build.samples > 1 else keys
    return scores + SINGLE * (heads + copies) * keys + build.number * copies * values


SPARSE = Symbol("sparse attention", _work, _parameters, _activations)
