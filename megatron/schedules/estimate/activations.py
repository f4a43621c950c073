"""Activation memory of a microbatch on a tensor-parallel rank, in bytes per token, tensor by tensor.

Counts the tensors that each operation saves for its backward as in arXiv 2205.05198, section 4. Adds grouped queries,
rotary positions, gated MLPs, experts, split backwards and FP8. A linear keeps its input, and from I to W its output's
gradient too, in FP8 one copy of each. Fused attention keeps its inputs and its output. A view keeps its whole base.
``tests/integration/test_dry_run_memory.py`` compares this with bytes counted in jobs on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.build import Build, Latent, LayerKind

_SINGLE = 4.0


class Kept(NamedTuple):
    """Bytes per token.

    Args:
        forward: bytes from F to I.
        weights: bytes from I to W.
    """

    forward: float = 0.0
    weights: float = 0.0

    def plus(self, other: Kept) -> Kept:
        """Sum of both."""
        return Kept(self.forward + other.forward, self.weights + other.weights)


Layer = Mapping[str, Kept]
"""A decoder layer by its parts; those that Megatron can recompute alone have its name for them."""


@dataclass(frozen=True)
class Activations:
    """Activations of a model, part by part.

    Args:
        first: the embedding.
        mask: attention mask shared by all layers of the first stage, and by all layers of the last stage.
        layers: each decoder layer by its parts.
        last: final norm and output layer.
        norm: the final norm alone.
        ahead: one layer of multi-token prediction with its logits.
        input: input of a decoder layer, which stays allocated if the layer is recomputed.
        words: under vocabulary parallelism, activations of the output layer on each rank, and on all ranks together.
    """

    first: Kept
    mask: float
    layers: tuple[Layer, ...]
    last: Kept
    norm: Kept
    ahead: Kept
    input: float
    words: tuple[float, float]


def activations(build: Build) -> Activations:
    """Counts the activations of ``build``."""
    hidden = build.shape.hidden / _between(build)
    kinds = {kind: _layer(build, kind) for kind in {*build.kinds, build.kind_ahead}}
    norm = Kept(_norm_input(build, hidden) + build.operand(quantized=build.output_quantized) * hidden)
    size = build.number if build.fused_loss else _SINGLE
    logits = Kept(size * build.shape.vocabulary / build.tensor)
    ahead = Kept()
    if build.shape.ahead:
        # Both streams' norms, and their outputs side by side for the projection that joins them.
        operand = build.operand(quantized=build.kind_ahead.quantized)
        both = Kept(2 * _norm_input(build, hidden) + 2 * operand * hidden, 3 * operand * hidden)
        ahead = whole(kinds[build.kind_ahead]).plus(both).plus(norm).plus(logits)
    return Activations(
        first=Kept(_mask(build) * hidden),
        mask=float(build.shape.sequence) if build.given_mask and not build.shape.fused else 0.0,
        layers=tuple(kinds[kind] for kind in build.kinds),
        last=norm.plus(logits),
        norm=norm,
        ahead=ahead,
        input=build.residual * hidden,
        words=(build.number * build.shape.hidden, build.number * build.shape.vocabulary / build.tensor),
    )


def whole(layer: Layer, without: Collection[str] = ()) -> Kept:
    """Sums up a layer. ``without`` names parts that I recomputes, whose forward activations are left out."""
    total = Kept()
    for name, part in layer.items():
        total = total.plus(part._replace(forward=0.0) if name in without else part)
    return total


def _between(build: Build) -> int:
    """Number of ranks over which the hidden states between linears are split."""
    return build.tensor if build.sequence_parallel else 1


def _mask(build: Build) -> float:
    """Bytes of the mask of the dropout after attention, the MLP or the embedding."""
    return _number_of_mask(build) if build.shape.masks[1] else 0.0


def _number_of_mask(build: Build) -> float:
    return build.number if build.plain else 1.0


def _norm_input(build: Build, width: float) -> float:
    if build.plain and not build.two_norms:
        return 2 * _SINGLE * width
    return build.residual * width


def _layer(build: Build, kind: LayerKind) -> Layer:
    hidden, operand = build.shape.hidden / _between(build), build.operand(quantized=kind.quantized)
    # Of a latent attention's input each of the first two linears has a quantized copy.
    into = (2 if kind.quantized and build.shape.latent else 1) * operand * hidden
    # A router keeps its input itself and computes its weight gradient in I.
    behind = Kept(build.number * hidden) if kind.experts else Kept(operand * hidden, operand * hidden)
    parts = {
        "inputs": Kept(2 * _norm_input(build, hidden)),
        "layernorm": Kept(into, into).plus(behind),  # outputs of both norms
        "core_attn": Kept(_scores(build)),
        "masks": Kept(2 * _mask(build) * hidden),
        "graphs": Kept(_static(build, kind) * build.number * hidden),
    }
    latent = build.shape.latent
    parts |= _attention(build, operand) if latent is None else _latent(build, operand, latent)
    return parts | (_experts(build, operand) if kind.experts else _feed_forward(build, operand))


def _static(build: Build, kind: LayerKind) -> float:
    """Hidden states per token that graphs of a layer keep beside its activations, from F to I.

    The input of a whole layer is a copy of the output below, which stays too. Where tokens are permuted in a graph for
    experts on other ranks, they stay after they are sent.
    """
    if build.graphs is None or build.shape.experts is None or not kind.experts:
        return float(build.graphs == frozenset())
    return float(build.shape.experts.chosen if "moe_preprocess" in build.graphs else not build.graphs)


def _shared(build: Build, operand: float, *, kept: bool) -> float:
    """Bytes of one number that a linear reads, and that its producer keeps too if ``kept``."""
    if operand == build.number or (build.quantized and build.quantized.keeps_originals):
        return build.number
    return operand + (build.number if kept else 0.0)


def _for_rows(build: Build, operand: float, width: float) -> float:
    """Bytes from I to W of a row parallel linear: its input of ``width``, and its output's gradient.

    Tensor-parallel ranks that add to ``main_grad`` compute its product in I. Quantized gradients stay gathered.
    """
    if build.tensor > 1 and build.fused_gradients:
        return 0.0
    return operand * (width + build.shape.hidden / (_between(build) if operand == build.number else 1))


def _scores(build: Build) -> float:
    heads, sequence = build.shape.heads / build.tensor, build.shape.sequence
    if build.shape.fused:
        return _SINGLE * heads  # the logarithm of each row's sum
    dropped = build.number + _number_of_mask(build) if build.shape.masks[0] else 0.0
    return (build.number + dropped) * heads * sequence


def _attention(build: Build, operand: float) -> dict[str, Kept]:
    """Bytes of each part of attention.

    Queries, keys and values are views of one tensor, which stays allocated as long as any of them is not copied.
    """
    queries, keys = build.queries / build.tensor, float(build.groups * build.head)
    together = queries + 2 * keys
    grouped = build.groups * build.head < queries
    changed = build.rotary or build.head_norms
    if grouped and not build.shape.fused:
        # Each group's keys and values are copied for every head, and queries unless they lie side by side.
        alone = build.groups == 1 and build.samples == 1 and not changed
        kept = 2 * queries + (together if alone else queries)
    elif build.contiguous:
        kept = together
    else:
        kept = together + (queries if changed or grouped else 0.0) + (keys if changed else 0.0)
    if build.rotary and not build.fused_rotary:
        kept += 4 * build.head / build.samples  # sines and cosines, for queries and for keys
    scored = _shared(build, operand, kept=build.shape.fused) * queries
    return {"attention": Kept(build.number * kept + scored, operand * together + _for_rows(build, operand, queries))}


def _latent(build: Build, operand: float, latent: Latent) -> dict[str, Kept]:
    heads, number = build.shape.heads / build.tensor, build.number
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
        kept += _norm_input(build, squeezed) if build.plain else number * down
    kept += _shared(build, operand, kept=build.shape.fused) * values
    return {
        "mla_up_proj": Kept(number * (2 * queries + values)),
        "attention": Kept(kept, operand * (goes_up + queries + together + down) + _for_rows(build, operand, values)),
    }


def _feed_forward(build: Build, operand: float) -> dict[str, Kept]:
    inner = (build.shape.inner or 4 * build.shape.hidden) / build.tensor
    return {"mlp": _linears(build, operand, inner, rows=1.0).plus(Kept(0.0, _for_rows(build, operand, inner)))}


def _linears(build: Build, operand: float, inner: float, rows: float, scaled: bool = False) -> Kept:
    """Bytes of the activations between both linears of an MLP, and for W of the first.

    Args:
        operand: bytes of one number of a linear's input, or of its output's gradient.
        inner: width.
        rows: rows per token.
        scaled: true if rows are weighted after the activation function.
    """
    wide = (2 if build.shape.gated else 1) * inner
    apart = 0.0
    if not build.fused_activation:
        apart = (2 * inner if build.shape.gated else 0.0) + (inner if scaled else 0.0)
    return Kept(rows * (build.number * (wide + apart) + operand * inner), rows * operand * wide)


def _experts(build: Build, operand: float) -> dict[str, Kept]:
    experts = build.shape.experts
    assert experts is not None, "the layer has experts"
    hidden, chosen = build.shape.hidden, experts.chosen
    # Tokens are split over tensor-parallel ranks and gathered by those of an expert, evenly over experts.
    rows = chosen * build.expert_tensor / build.tensor
    outer = operand * rows * hidden
    routed = _linears(build, operand, experts.inner / build.expert_tensor, rows, scaled=True)
    # Scores of all experts; numbers, places and weights of the chosen ones.
    router = (8.0 * build.experts + 22.0 * chosen) / _between(build)
    second = operand * rows * experts.inner / build.expert_tensor
    parts = {
        "router": Kept(router),
        "moe_act": Kept(second),
        "moe": routed.plus(Kept(outer - second, 2 * outer + second)),
    }
    if experts.shared:
        width, inner = hidden / _between(build), experts.shared / build.tensor
        copy = (_shared(build, operand, kept=True) - build.number) * width  # of the router's input
        shared = _linears(build, operand, inner, 1.0)
        parts["shared_experts"] = shared.plus(Kept(copy, operand * width + _for_rows(build, operand, inner)))
    return parts
