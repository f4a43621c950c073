"""What the parts of a decoder layer compute and hold for one token, by the arithmetic of a transformer."""

from __future__ import annotations

from typing import NamedTuple

# Products of attention backward against forward in one kernel, which computes the scores again (arXiv 2205.14135).
FUSED_BACKWARD = 2.5
# Bytes that F and I move for each logit: the softmax reads and writes them in single precision.
MOVED_BY_LOGITS = 18.0, 6.0


class Work(NamedTuple):
    """One part's cost for a token.

    Args:
        flops: multiplications and additions in products of matrices, forward.
        held: bytes of activations at half precision, kept for the backward.
    """

    flops: float
    held: float

    def __add__(self, other: tuple[float, ...]) -> Work:  # type: ignore[override]
        return Work(self.flops + other[0], self.held + other[1])


class Latent(NamedTuple):
    """Multi-latent attention (arXiv 2405.04434): the widths that queries, keys and values are squeezed to.

    Args:
        query: of the queries; None where they are not squeezed.
        key_value: of keys and values together.
        head, position, value: of one head's query without position, its position, and its value.
    """

    query: int | None
    key_value: int
    head: int
    position: int
    value: int


class Layer(NamedTuple):
    """A decoder layer's parts, as arXiv 2205.05198 takes them apart in sections 3 and 4 and appendix A.

    Args:
        norms: both layer norms.
        projections: into and out of attention.
        scores: attention itself. A fused kernel holds nothing of them.
        mlp: the feed-forward part; with experts, those that one token goes through.
    """

    norms: Work
    projections: Work
    scores: Work
    mlp: Work

    @property
    def whole(self) -> Work:
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
    latent: Latent | None = None,
    routed: int = 1,
    masks: tuple[bool, bool] = (True, True),
) -> Layer:
    """A layer's loads for one token.

    Args:
        hidden, heads, sequence: the model's width, attention heads and sequence length.
        width: of all heads together; ``hidden`` without it.
        groups: of queries that share keys and values; as many as heads without it.
        inner: width inside the feed-forward part; four times ``hidden`` without it.
        gated: whether that part has a second projection, as SwiGLU.
        fused: whether attention is one kernel, such as FlashAttention.
        latent: of multi-latent attention, instead of ``width`` and ``groups``.
        routed: copies of a token that experts are given.
        masks: whether there is dropout, of the scores and behind attention and the feed-forward part.
    """
    width, groups, inner = width or hidden, groups or heads, inner or 4 * hidden
    weights, queries, values = hidden * width * (2 + 2 * groups / heads), width, width
    keys = width * groups / heads
    # A byte for each number; of the scores dropout keeps its output too.
    of_scores, behind = 3.0 * masks[0], 1.0 * masks[1]
    if latent is not None:
        queries, values = heads * (latent.head + latent.position), heads * latent.value
        keys = (queries + values) / 2
        weights = _attention_weights(hidden, heads, latent)
    return Layer(
        norms=Work(0.0, 4.0 * hidden),
        # Kept: the input, queries, keys and values, what comes out of attention, and the mask of the dropout behind it.
        projections=Work(2 * weights, (2.0 + behind) * hidden + 2 * (queries + 2 * keys + values)),
        # Causal: each token looks at half of the sequence on average, once for the scores and once with them.
        scores=Work(sequence * (queries + values), 0.0 if fused else (2.0 + of_scores) * heads * sequence),
        mlp=Work(
            2.0 * hidden * inner * (3 if gated else 2),
            (behind + 2.0 * routed) * hidden + (6.0 if gated else 4.0) * inner,
        ),
    )


def moved(hidden: int, inner: float) -> tuple[float, float]:
    """Bytes a token that a layer's F and I move beside products: norms, dropouts and sums around them, GELU."""
    return 22.0 * hidden + 4.0 * inner, 22.0 * hidden + 6.0 * inner


def _attention_weights(hidden: int, heads: int, latent: Latent) -> float:
    """Parameters of multi-latent attention's projections."""
    queries, keys = heads * (latent.head + latent.position), heads * (latent.head + latent.value)
    into = hidden * queries if latent.query is None else latent.query * (hidden + queries)
    return (
        into + hidden * (latent.key_value + latent.position) + latent.key_value * keys + heads * latent.value * hidden
    )


def output_layer(hidden: int, vocabulary: int) -> Work:
    """The output layer and its loss; the embedding at the other end takes next to nothing."""
    return Work(2.0 * hidden * vocabulary, 4.0 * (hidden + vocabulary))
