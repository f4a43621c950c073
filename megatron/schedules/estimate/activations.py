"""Activation memory of a microbatch on a tensor-parallel rank, in bytes per token, tensor by tensor.

Counts the tensors that each operation saves for its backward as in arXiv 2205.05198, section 4. Adds grouped queries,
rotary positions, gated MLPs, experts, split backwards, FP8 and the other parts of hybrid models (:mod:`.symbols`). A
linear keeps its input, and from I to W its output's gradient too, in FP8 one copy of each.
``tests/integration/test_dry_run_memory.py`` compares this with bytes counted in jobs on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import SINGLE, Kept, Layer, between, hidden_mask, norm_input, streams
from megatron.schedules.estimate.symbols import layer_activations


@dataclass(frozen=True)
class Activations:
    """Activations of a model, part by part.

    Args:
        first: the embedding.
        mask: attention mask shared by all layers of the first stage, and by all layers of the last stage.
        layers: each decoder layer by its pieces.
        last: final norm and output layer.
        norm: the final norm alone.
        ahead: each layer of multi-token prediction with its logits.
        input: input of a decoder layer, which stays allocated if the layer is recomputed.
        words: under vocabulary parallelism, activations of the output layer on each rank, and on all ranks together.
    """

    first: Kept
    mask: float
    layers: tuple[Layer, ...]
    last: Kept
    norm: Kept
    ahead: tuple[Kept, ...]
    input: float
    words: tuple[float, float]


def activations(build: Build) -> Activations:
    """Counts the activations of ``build``."""
    hidden = build.shape.hidden / between(build)
    kinds = {kind: layer_activations(build, kind) for kind in {*build.kinds, *build.kinds_ahead}}
    norm = Kept(norm_input(build, hidden) + build.operand(quantized=build.output_quantized) * hidden)
    if build.streams > 1:  # merged before it
        norm = norm.plus(Kept(streams(build)))
    size = build.number if build.fused_loss else SINGLE
    logits = Kept(size * build.shape.vocabulary / build.tensor)
    ahead = []
    for kind in build.kinds_ahead:
        # Both streams' norms, and their outputs side by side for the projection that joins them.
        operand = build.operand(quantized=kind.quantized)
        both = Kept(2 * norm_input(build, hidden) + 2 * operand * hidden, 3 * operand * hidden)
        ahead.append(whole(kinds[kind]).plus(both).plus(norm).plus(logits))
    return Activations(
        first=Kept(hidden_mask(build) * hidden),
        mask=float(build.shape.sequence) if build.given_mask and not build.shape.fused else 0.0,
        layers=tuple(kinds[kind] for kind in build.kinds),
        last=norm.plus(logits),
        norm=norm,
        ahead=tuple(ahead),
        input=streams(build),
        words=(build.number * build.shape.hidden, build.number * build.shape.vocabulary / build.tensor),
    )


def whole(layer: Layer, without: Collection[str] = ()) -> Kept:
    """Sums up a layer. ``without`` names parts that I recomputes, whose forward activations are left out."""
    total = Kept()
    for name, part in layer.items():
        total = total.plus(part._replace(forward=0.0) if name in without else part)
    return total
