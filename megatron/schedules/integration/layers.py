"""How many decoder layers each stage holds: all alike, the embedding and the output layer counting for one each."""

from __future__ import annotations

from typing import Any

from megatron.schedules.planning.errors import PlanError


def layers_by_stage(args: Any, stages: int) -> tuple[int, ...]:
    """Decoder layers of each of ``stages`` stages in model order.

    With ``--account-for-embedding-in-pipeline-split`` the first stage has one fewer than the others, with
    ``--account-for-loss-in-pipeline-split`` the last one; a stage of one then holds no decoder layer at all.

    Raises:
        PlanError: where the layers do not spread so, naming a number that does.
    """
    first, last = bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)
    counted = (args.num_layers or 0) + first + last
    each, rest = divmod(counted, stages)
    if rest or not each:
        also = " and ".join(["the embedding"] * first + ["the output layer"] * last)
        instead = f"{stages * max(1, each) - first - last} or {stages * (each + 1) - first - last}"
        raise PlanError(
            f"has {stages} stages: --num-layers{f' with {also}' if also else ''} must be a multiple of {stages}; "
            f"use {instead}, not {args.num_layers}"
        )
    counts = [each] * stages
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)
