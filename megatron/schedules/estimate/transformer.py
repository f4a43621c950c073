"""What the parts of a decoder layer compute and hold for one token, by the arithmetic of a transformer."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """One part's cost.

    Args:
        flops: multiplications and additions in products of matrices, forward.
        held: bytes of activations at half precision, kept for the backward.
    """

    flops: float
    held: float

    def __add__(self, other: tuple[float, ...]) -> Load:  # type: ignore[override]
        return Load(self.flops + other[0], self.held + other[1])

    def times(self, factor: float) -> Load:
        """So many of them."""
        return Load(self.flops * factor, self.held * factor)


class Layer(NamedTuple):
    """A decoder layer's parts, as arXiv 2205.05198 takes them apart in sections 3 and 4 and appendix A.

    Args:
        norms: both layer norms.
        projections: into and out of attention.
        scores: attention itself. A fused kernel holds nothing of them.
        mlp: the feed-forward part; with experts, those that one token goes through.
    """

    norms: Load
    projections: Load
    scores: Load
    mlp: Load

    @property
    def whole(self) -> Load:
        """All of it."""
        return self.norms + self.projections + self.scores + self.mlp


def decoder_layer(
    hidden: int,
    heads: int,
    sequence: int,
    *,
    width: int | None = None,
    groups: int | None = None,
    inner: int | None = None,
    gated: bool = False,
    fused: bool = True,
) -> Layer:
    """A layer's loads for one token.

    Args:
        hidden, heads, sequence: the model's width, attention heads and sequence length.
        width: of all heads together; ``hidden`` without it.
        groups: of queries that share keys and values; as many as heads without it.
        inner: width inside the feed-forward part; four times ``hidden`` without it.
        gated: whether that part has a second projection, as SwiGLU.
        fused: whether attention is one kernel, such as FlashAttention.
    """
    width, groups, inner = width or hidden, groups or heads, inner or 4 * hidden
    return Layer(
        norms=Load(0.0, 4.0 * hidden),
        projections=Load(2 * hidden * width * (2 + 2 * groups / heads), 11.0 * hidden),
        # Causal: each token looks at half of the sequence on average, once for the scores and once with them.
        scores=Load(2.0 * sequence * width, 0.0 if fused else 5.0 * heads * sequence),
        mlp=Load(2.0 * hidden * inner * (3 if gated else 2), 3.0 * hidden + 4.0 * inner),
    )


def output_layer(hidden: int, vocabulary: int) -> Load:
    """The output layer and its loss; the embedding at the other end takes next to nothing."""
    return Load(2.0 * hidden * vocabulary, 4.0 * (hidden + vocabulary))
