"""What Megatron's activation recompute costs and saves, for the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.transformer import Layer
from megatron.schedules.planning.costs import Costs


def with_recompute(costs: Costs, args: Any, parts: Layer, layers_a_stage: float) -> Costs:
    """``costs`` with what ``--recompute-granularity`` and its like add to I and leave of the activations.

    A recomputed layer runs its forward once more, in I, and from then until W holds what W needs. The time is added
    to the input gradient's given with ``--pipeline-schedule-costs``, which is that without recompute.

    Args:
        args: Megatron's, validated or not.
        parts: of the model's decoder layers.
        layers_a_stage: decoder layers of a stage, of which ``--recompute-method block`` recomputes a number.
    """
    if args.recompute_granularity is None:
        return costs
    whole = parts.whole
    until_weights = 1 - parts.scores.held / whole.held
    if args.recompute_granularity == "full":
        inputs = 2.0 * args.hidden_size
        each = args.recompute_num_layers or 1
        share = 1.0 if args.recompute_method == "uniform" else min(1.0, each / max(layers_a_stage, 1.0))
        inputs /= each if args.recompute_method == "uniform" else 1
        kept = 1 - share * (1 - inputs / whole.held)
        return replace(costs, recompute=share, kept=kept, weight_share=until_weights)
    again, dropped = 0.0, 0.0
    for module in args.recompute_modules or ["core_attn"]:
        part = {"core_attn": parts.scores, "mlp": parts.mlp, "moe": parts.mlp, "layernorm": parts.norms}.get(module)
        if part is not None:  # the others are small
            again, dropped = again + part.flops, dropped + part.held
    return replace(costs, recompute=again / whole.flops, kept=1 - dropped / whole.held, weight_share=until_weights)
