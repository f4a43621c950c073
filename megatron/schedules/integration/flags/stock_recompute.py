"""What Megatron's activation recompute adds to the input gradient."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate.transformer import Layer


def recomputed_share(args: Any, parts: Layer, layers_a_stage: float) -> float:
    """The part of the forward that I computes once more, as ``--recompute-granularity`` and its like ask.

    Times given with ``--pipeline-costs`` are those without recompute.

    Args:
        args: Megatron's, validated or not.
        parts: of the model's decoder layers.
        layers_a_stage: decoder layers of a stage, of which ``--recompute-method block`` recomputes a number.
    """
    if args.recompute_granularity is None:
        return 0.0
    if args.recompute_granularity == "full":
        each = args.recompute_num_layers or 1
        return 1.0 if args.recompute_method == "uniform" else min(1.0, each / max(layers_a_stage, 1.0))
    recomputed = 0.0
    for module in args.recompute_modules or ["core_attn"]:
        part = {"core_attn": parts.scores, "mlp": parts.mlp, "moe": parts.mlp, "layernorm": parts.norms}.get(module)
        if part is not None:  # the others are small
            recomputed += part.flops
    return recomputed / parts.whole.flops
