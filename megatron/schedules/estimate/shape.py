"""A GPT's shape, and from it the loads of its embedding, its layers and its output layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.schedules.estimate.transformer import (
    FUSED_BACKWARD,
    MOVED_BY_LOGITS,
    Latent,
    Layer,
    decoder_layer,
    moved,
    output_layer,
)
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part

# Multiplications and additions that a GPU does in the time in which its memory moves a byte: between an A100's 150 and
# an H100's 300 (data sheets). It weighs norms, activations and the softmax of the logits against products of matrices.
_BALANCE = 200.0
# Products of attention's backward against its forward where the scores are kept.
_KEPT_BACKWARD = 2.0


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
        width, groups, inner, gated, fused, latent, masks: see :func:`.transformer.decoder_layer`.
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
    masks: tuple[bool, bool] = (True, True)

    def layer(self, *, experts: bool = False) -> Layer:
        """One decoder layer's parts for a token, dense or with experts."""
        routed = self.experts.chosen if experts and self.experts else 1
        return decoder_layer(
            self.hidden,
            self.heads,
            self.sequence,
            width=self.width,
            groups=self.groups,
            inner=self._inner(experts=experts),
            gated=self.gated,
            fused=self.fused,
            latent=self.latent,
            routed=routed,
            masks=self.masks,
        )

    @cached_property
    def attention(self) -> tuple[float, float]:
        """The shares of an average layer's F and I that are attention's, of a sample that is one sequence."""
        scores, mean = self.layer().scores.flops, self.loads.mean
        backward = FUSED_BACKWARD if self.fused else _KEPT_BACKWARD
        return scores / mean.forward, backward * scores / mean.input_grad

    @cached_property
    def loads(self) -> ModelLoads:
        """What each part costs for one token: times in multiplications and additions, bytes at half precision."""
        dense, expert = (self._part(experts=experts) for experts in (False, True))
        where = self.experts.where if self.experts else (False,) * self.layers
        layers = tuple(expert if each else dense for each in where)
        last = self._output()
        for _ in range(self.ahead):
            # Two streams are joined by a projection before the layer, and its logits are computed beside the model's.
            joined = _products(4.0 * self.hidden**2, 2 * 2.0 * self.hidden)
            ahead = Part(layers[-1].split.plus(joined), self._output().whole)
            last = last.plus(ahead)
        looked_up = _BALANCE * 4.0 * self.hidden
        first = Part(whole=Load(looked_up, looked_up, 0.0, 1.0 * self.masks[1] * self.hidden))
        # Every rank keeps the hidden states, and for its words what the loss says of each, at half precision.
        kept = 2.0 * self.hidden, 2.0 * self.vocabulary
        return ModelLoads(first, layers, last, kept_for_output=kept)

    def _inner(self, *, experts: bool) -> int:
        """The width inside the feed-forward part that one token goes through."""
        if experts and self.experts is not None:
            return self.experts.inner * self.experts.chosen + self.experts.shared
        return self.inner or 4 * self.hidden

    def _part(self, *, experts: bool) -> Part:
        parts, inner = self.layer(experts=experts), self._inner(experts=experts)
        products, scores = parts.projections.flops + parts.mlp.flops, parts.scores.flops
        forward, backward = moved(self.hidden, inner)
        return Part(
            split=Load(
                products + scores + _BALANCE * forward,
                products + (FUSED_BACKWARD if self.fused else _KEPT_BACKWARD) * scores + _BALANCE * backward,
                products,
                parts.whole.held,
            )
        )

    def _output(self) -> Part:
        work = output_layer(self.hidden, self.vocabulary)
        forward, backward = (_BALANCE * each * self.vocabulary for each in MOVED_BY_LOGITS)
        return Part(whole=Load(work.flops + forward, work.flops + backward, work.flops, work.held))


def _products(flops: float, held: float) -> Load:
    return Load(flops, flops, flops, held)
