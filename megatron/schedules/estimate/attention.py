"""Attention (``*``), and multi-latent attention (``+``): estimates of both.

Fused attention keeps its inputs and its output. A view keeps its whole base.
"""

from __future__ import annotations

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
    flops,
    for_rows,
    into_linear,
    mask_number,
    norm_input,
    norm_parameters,
    shared,
    weights,
)
from megatron.schedules.estimate.shape import Latent

# Products of attention's backward over its forward: fused, which recomputes the scores (arXiv 2205.14135), and unfused.
_FUSED_BACKWARD, _KEPT_BACKWARD = 2.5, 2.0


def _linears(build: Build) -> tuple[LinearShape, LinearShape]:
    hidden, queries = build.shape.hidden, build.queries / build.tensor
    into = queries + _gates(build) + 2 * float(build.groups * build.head)
    return LinearShape(hidden, into, name="linear_qkv"), LinearShape(queries, hidden, name="linear_proj")


def _gates(build: Build) -> float:
    """Numbers per token that multiply attention's output, each through a sigmoid."""
    return build.queries / build.tensor if build.output_gates else 0.0


def _work(build: Build) -> PartWork:
    # Causal: each token attends to half of the sequence on average, with two products.
    return _scored(build, _linears(build), 2 * build.queries / build.tensor)


def _scored(
    build: Build, linears: tuple[LinearShape, ...], width: float, projected_up: float = 0.0, joined: float = 0.0
) -> PartWork:
    """Work of attention, whose scores and their sums have ``width`` in all.

    Args:
        build, linears, width: the model; linears around attention; that width.
        projected_up: FLOPs of a token that project it up.
        joined: bytes of a token that F, and I, move for keys and values that linears do not give as they are read.
    """
    scores, moved = build.shape.sequence * width, around(build) + joined
    backward = (_FUSED_BACKWARD if build.shape.fused else _KEPT_BACKWARD) * scores
    modules = {"core_attn": (0.0, scores), "mla_up_proj": (projected_up, 0.0)}
    return PartWork(linears, (scores, backward), moved=(moved, moved), modules=modules)


def _parameters(build: Build) -> Count:
    into, out = _linears(build)
    dense = norm_parameters(build, build.shape.hidden) + weights((into, out)) + (out.out if build.biases else 0.0)
    dense += into.out if build.biases or build.attention_biases else 0.0
    return Count(dense + (2 * norm_parameters(build, build.head) if build.head_norms else 0.0))


def _activations(build: Build, operand: float) -> Layer:
    """Bytes of each piece.

    Queries, keys and values are views of one tensor, which stays allocated as long as any of them is not copied.
    """
    queries, keys = build.queries / build.tensor, float(build.groups * build.head)
    gates = _gates(build)
    together = queries + gates + 2 * keys
    grouped = build.groups * build.head < queries
    changed = build.rotary or build.head_norms
    if grouped and not build.shape.fused:
        # Each group's keys and values are copied for every head, and queries unless they lie side by side.
        alone = build.groups == 1 and build.samples == 1 and not changed
        kept = 2 * queries + (together if alone else queries)
    elif build.contiguous:
        kept = together - gates
    else:
        kept = together + (queries if changed or grouped else 0.0) + (keys if changed else 0.0)
    statistics = 0.0
    if build.head_norms and build.contiguous:  # Transformer Engine's norms copy what is not contiguous, and keep that
        kept += queries + keys
        statistics = (2 if build.two_norms else 1) * SINGLE * (build.shape.heads / build.tensor + build.groups)
    if build.rotary and not build.fused_rotary:
        kept += 4 * build.head / build.samples  # sines and cosines, for queries and for keys
    if gates:  # the product is another tensor than what attention gives; torch's own keep sigmoids, a kernel the gates
        scored = (build.number + operand) * queries + (SINGLE if build.plain else build.number) * gates
    else:
        scored = shared(build, operand, kept=build.shape.fused) * queries
    return {
        **around_part(build, into_linear(build, operand)),
        "core_attn": scores_kept(build),
        "attention": Kept(
            build.number * kept + statistics + scored, operand * together + for_rows(build, operand, queries)
        ),
    }


def scores_kept(build: Build) -> Kept:
    """Bytes of the scores."""
    heads, sequence = build.shape.heads / build.tensor, build.shape.sequence
    if build.shape.fused:
        return Kept(SINGLE * heads)  # the logarithm of each row's sum
    dropped = build.number + mask_number(build) if build.shape.masks[0] else 0.0
    return Kept((build.number + dropped) * heads * sequence)


def latent_of(build: Build) -> Latent:
    """Returns the sizes of the model's latent attention."""
    assert build.shape.latent is not None, "a layer has latent attention"
    return build.shape.latent


def latent_linears(build: Build) -> tuple[LinearShape, ...]:
    """Linears of latent attention. Each tensor-parallel rank has the whole down-projections."""
    hidden, heads, latent = build.shape.hidden, build.shape.heads / build.tensor, latent_of(build)
    queries, values = heads * (latent.head + latent.position), heads * latent.value
    if latent.query is None:
        into: tuple[LinearShape, ...] = (LinearShape(hidden, queries, name="linear_q_proj"),)
    else:
        down = LinearShape(hidden, latent.query, name="linear_q_down_proj")
        into = down, LinearShape(latent.query, queries, name="linear_q_up_proj")
    return (
        *into,
        LinearShape(hidden, latent.key_value + latent.position, name="linear_kv_down_proj"),
        LinearShape(latent.key_value, heads * latent.head + values, name="linear_kv_up_proj"),
        LinearShape(values, hidden, name="linear_proj"),
    )


def _latent_work(build: Build) -> PartWork:
    latent, heads, linears = latent_of(build), build.shape.heads / build.tensor, latent_linears(build)
    up = flops([linear for linear in linears if linear.inner in (latent.query, latent.key_value)])
    width = heads * (latent.head + latent.position + latent.value)
    # What is projected up is read. Keys are joined with their positions, values copied.
    joined = build.number * (heads * (latent.head + latent.value) + width)
    return _scored(build, linears, width, up, joined)


def latent_parameters(build: Build) -> Count:
    """Parameters of latent attention and its norm."""
    latent, linears = latent_of(build), latent_linears(build)
    dense = norm_parameters(build, build.shape.hidden) + weights(linears) + (linears[-1].out if build.biases else 0.0)
    return Count(dense + (norm_parameters(build, (latent.query or 0) + latent.key_value) if build.head_norms else 0.0))


def _latent_activations(build: Build, operand: float) -> Layer:
    latent, heads, number = latent_of(build), build.shape.heads / build.tensor, build.number
    queries, values = heads * (latent.head + latent.position), heads * latent.value
    # Keys and values are projected up together. Keys, and queries, are then joined with their positions, values copied.
    together = heads * latent.head + values
    squeezed = (latent.query or 0) + latent.key_value
    down = squeezed + latent.position
    # Between down- and up-projection is a norm. A quantized copy has no positions, and keeps no base.
    bare = build.head_norms or operand != number
    goes_up = squeezed if bare else down
    kept = operand * goes_up
    if build.head_norms:
        kept += norm_input(build, squeezed) if build.plain else number * down
    kept += shared(build, operand, kept=build.shape.fused) * values
    # Each of the first two linears has a quantized copy of the input.
    return {
        **around_part(build, into_linear(build, operand, 1 if operand == number else 2)),
        "core_attn": scores_kept(build),
        "mla_up_proj": Kept(number * (2 * queries + values)),
        "attention": Kept(kept, operand * (goes_up + queries + together + down) + for_rows(build, operand, values)),
    }


ATTENTION = Symbol("attention", _work, _parameters, _activations)
LATENT = Symbol("multi-latent attention", _latent_work, latent_parameters, _latent_activations)
