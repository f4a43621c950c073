"""The loads of a layer of the model that Megatron's arguments describe."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate import transformer
from megatron.schedules.estimate.transformer import Layer, Load


def layer(args: Any) -> Layer:
    """A decoder layer of the model in Megatron's ``args``, validated or not, for one token."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    inner = args.ffn_hidden_size or 4 * hidden
    if args.num_experts:
        inner = (args.moe_ffn_hidden_size or inner) * args.moe_router_topk
        inner += args.moe_shared_expert_intermediate_size or 0
    return transformer.decoder_layer(
        hidden,
        heads,
        args.seq_length,
        width=heads * (args.kv_channels or hidden // heads),
        groups=args.num_query_groups if args.group_query_attention else heads,
        inner=inner,
        gated=bool(args.swiglu),
        fused=args.transformer_impl != "local",
    )


def output_layer(args: Any) -> Load:
    """The output layer and the loss of that model, for one token."""
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    return transformer.output_layer(args.hidden_size, vocabulary)
