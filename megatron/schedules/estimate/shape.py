"""A GPT's shape, and from it the loads of its embedding, its layers and its output layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedules.estimate.transformer import Latent, Layer, attention_weights, decoder_layer, output_layer
from megatron.schedules.planning.loads import Load, ModelLoads, Part

# Multiplications and additions that a GPU does in the time in which its memory moves a byte: between an A100's 150 and
# an H100's 300 (data sheets). It weighs norms, activations and the softmax of the logits against products of matrices.
_BALANCE = 200.0
# Products of attention's backward against its forward: a fused kernel computes the scores again (arXiv 2205.14135).
_FUSED, _KEPT = 2.5, 2.0


@dataclass(frozen=True)
class Experts:
    """What stands in the place of a feed-forward part.

    Args:
        where: of each layer, whether it has them.
        inner: width of one expert, and of those that all tokens go through (``shared``).
        chosen: experts that a token goes through.
        number: on each device.
    """

    where: tuple[bool, ...]
    inner: int
    chosen: int
    number: float
    shared: int = 0


@dataclass(frozen=True)
class Shape:
    """A GPT.

    Args:
        layers, hidden, heads, sequence, vocabulary: its sizes; the vocabulary as padded, 0 where it is not known.
        width, groups, inner, gated, fused, latent: see :func:`.transformer.decoder_layer`.
        experts: where layers have them.
        ahead: layers of multi-token prediction, each a decoder layer with an output layer of its own use.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    width: int | None = None
    groups: int | None = None
    inner: int | None = None
    gated: bool = False
    fused: bool = True
    latent: Latent | None = None
    experts: Experts | None = None
    ahead: int = 0

    def layer(self, *, experts: bool = False) -> Layer:
        """One decoder layer's parts for a token, dense or with experts."""
        inner, routed = self.inner, 1
        if experts and self.experts is not None:
            inner, routed = self.experts.inner * self.experts.chosen + self.experts.shared, self.experts.chosen
        return decoder_layer(
            self.hidden,
            self.heads,
            self.sequence,
            width=self.width,
            groups=self.groups,
            inner=inner,
            gated=self.gated,
            fused=self.fused,
            latent=self.latent,
            routed=routed,
        )

    @property
    def loads(self) -> ModelLoads:
        """What each part costs for one token: times in multiplications and additions, bytes at half precision."""
        dense, expert = (self._part(experts=experts) for experts in (False, True))
        where = self.experts.where if self.experts else (False,) * self.layers
        layers = tuple(expert if each else dense for each in where)
        ends = float(self.hidden * self.vocabulary)
        last = self._output()._replace(parameters=ends)
        for _ in range(self.ahead):
            # Two streams are joined by a projection before the layer, and its logits are computed beside the model's.
            joined = _products(4.0 * self.hidden**2, 2 * 2.0 * self.hidden)
            ahead = Part(
                layers[-1].split.plus(joined), self._output().whole, layers[-1].parameters + 2 * self.hidden**2
            )
            last = last.plus(ahead)
        moved = _BALANCE * 4.0 * self.hidden
        first = Part(whole=Load(moved, moved, 0.0, 1.0 * self.hidden), parameters=ends)
        return ModelLoads(first, layers, last)

    def _part(self, *, experts: bool) -> Part:
        parts, hidden = self.layer(experts=experts), self.hidden
        inner = parts.mlp.flops / (2.0 * hidden * (3 if self.gated else 2))
        products = parts.projections.flops + parts.mlp.flops
        scores = parts.scores.flops
        # Norms, dropouts with the sums around them, and the activation function.
        moved = 22.0 * hidden + 4.0 * inner, 22.0 * hidden + 6.0 * inner
        return Part(
            split=Load(
                products + scores + _BALANCE * moved[0],
                products + (_FUSED if self.fused else _KEPT) * scores + _BALANCE * moved[1],
                products,
                parts.whole.held,
            ),
            parameters=self._weights(experts=experts),
        )

    def _output(self) -> Part:
        work = output_layer(self.hidden, self.vocabulary)
        # The softmax reads and writes logits in single precision.
        moved = 18.0 * self.vocabulary, 6.0 * self.vocabulary
        return Part(
            whole=Load(work.flops + _BALANCE * moved[0], work.flops + _BALANCE * moved[1], work.flops, work.held)
        )

    def _weights(self, *, experts: bool) -> float:
        hidden, heads, width = self.hidden, self.heads, self.width or self.hidden
        found = hidden * width * (2 + 2 * (self.groups or heads) / heads)
        if self.latent is not None:
            found = attention_weights(hidden, heads, self.latent)
        inner: float = self.inner or 4 * hidden
        if experts and self.experts is not None:
            inner = self.experts.inner * self.experts.number + self.experts.shared
        return found + (3 if self.gated else 2) * hidden * inner


def _products(flops: float, held: float) -> Load:
    return Load(flops, flops, flops, held)
