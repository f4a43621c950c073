"""Sparse attention (``D``): DeepSeek's, on absorbed latent attention, with an indexer that chooses what a token sees.

Its kernels run on no CPU, and no job has measured these estimates. They are for Megatron's fused kernels
(``--dsa-kernel-backend``), by what ``SparseMLA`` and ``IndexerFunction`` of its ``experimental_attention_variant/ops``
save. Without these kernels Megatron keeps the scores of all tokens, which is counted too.
"""

from __future__ import annotations

from megatron.schedules.estimate.attention import latent_linears, latent_of, latent_parameters, scores_kept
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import (
    Count,
    Kept,
    Layer,
    LinearShape,
    Symbol,
    Work,
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
    """Tokens that a token attends to, on average."""
    chosen, sequence = _indexer(build).chosen, build.shape.sequence
    return sequence / 2 if chosen >= sequence else chosen * (1 - chosen / (2 * sequence))


def _work(build: Build) -> Work:
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
    return Work(
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
    inside = squeezed + queries + heads * keys + keys + heads * latent.key_value + values
    if build.head_norms:
        inside += squeezed + keys
    chosen = _PLACE * min(indexer.chosen, build.shape.sequence)
    learned = 0.0
    if indexer.trained:
        learned = number * (2 * indexer.heads * indexer.head + 3 * indexer.head + indexer.heads)
    weights_kept = operand * (squeezed + queries + squeezed + keys) + for_rows(build, operand, values)
    parts = {
        **around_part(build, into_linear(build, operand)),
        "core_attn": Kept(chosen),
        "attention": Kept(number * inside + learned, weights_kept),
    }
    if not build.shape.fused:
        # Scores of all tokens in single precision, and what attention without sparse kernels makes of them.
        parts["core_attn"] = parts["core_attn"].plus(scores_kept(build)).plus(Kept(2 * number * heads * keys))
    return parts


SPARSE = Symbol("sparse attention", _work, _parameters, _activations)
