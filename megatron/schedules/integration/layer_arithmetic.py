"""What the parts of a decoder layer compute and hold for one token, by the arithmetic of a transformer."""

from __future__ import annotations

from typing import Any, NamedTuple


class Load(NamedTuple):
    """One part's cost.

    Args:
        work: multiplications and additions in products of matrices, forward.
        held: bytes of activations at half precision, kept for the backward.
    """

    work: float
    held: float

    def __add__(self, other: tuple[float, ...]) -> Load:  # type: ignore[override]
        return Load(self.work + other[0], self.held + other[1])

    def times(self, factor: float) -> Load:
        """So many of them."""
        return Load(self.work * factor, self.held * factor)


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


def layer(args: Any) -> Layer:
    """A decoder layer of the model that Megatron's ``args`` describe, validated or not."""
    hidden, heads, sequence = args.hidden_size, args.num_attention_heads, args.seq_length
    width = heads * (args.kv_channels or hidden // heads)
    groups = args.num_query_groups if args.group_query_attention else heads
    inner = args.ffn_hidden_size or 4 * hidden
    if args.num_experts:
        inner = (args.moe_ffn_hidden_size or inner) * args.moe_router_topk
        inner += args.moe_shared_expert_intermediate_size or 0
    fused = args.transformer_impl != "local"
    return Layer(
        norms=Load(0.0, 4.0 * hidden),
        projections=Load(2 * hidden * width * (2 + 2 * groups / heads), 11.0 * hidden),
        # Causal: each token looks at half of the sequence on average, once for the scores and once with them.
        scores=Load(2.0 * sequence * width, 0.0 if fused else 5.0 * heads * sequence),
        mlp=Load(2.0 * hidden * inner * (3 if args.swiglu else 2), 3.0 * hidden + 4.0 * inner),
    )


def output_layer(args: Any) -> Load:
    """The output layer and its loss; the embedding at the other end takes next to nothing."""
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    return Load(2.0 * args.hidden_size * vocabulary, 4.0 * (args.hidden_size + vocabulary))
