"""Memory of decoder layers as shares of their activations, for models whose bytes are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.schedules.schedule.kinds import Share
from megatron.schedules.schedule.layer_times import check_share
from megatron.schedules.schedule.model_loads import Part

# Largest weight_share. No linear layer's W needs so much more memory than its I, so a larger value is a mistake.
MOST_SHARE = 100
# Part of a layer's activations that is its input: 2 of some 34 bytes per token and hidden unit.
LAYER_INPUT = 0.06


@dataclass(frozen=True)
class MemoryShares:
    """Activation memory of decoder layers, relative to their activations without recompute.

    Args:
        weight_share: activations from I to W. May exceed 1, since I makes gradients for W.
        kept: activations that F keeps under Megatron's own recompute.
        layer_input: activations that stay if an R pass recomputes the layer.
    """

    weight_share: float = 1.0
    kept: float = 1.0
    layer_input: float = LAYER_INPUT

    def __post_init__(self) -> None:
        check_share(self.weight_share, "memory held until W", "weight_share", MOST_SHARE)
        check_share(self.layer_input, "memory that is a layer's input", "layer_input")
        check_share(self.kept, "memory kept for recomputing", "kept")

    def on_stages(
        self, unit: float, parts: Sequence[Part], recomputed: Sequence[float], offloaded: Sequence[float]
    ) -> dict[str, Any]:
        """Returns the fields of :class:`.StageCosts` about memory.

        The embedding and the output layer recompute nothing and leave nothing to W.

        Args:
            unit: load of one microbatch on an average rank.
            parts: load of each stage.
            recomputed, offloaded: part of each stage's layers that is recomputed by R, or offloaded.
        """
        activation = tuple(part.held / unit for part in parts)
        layers = tuple(part.split.held / unit for part in parts)
        by_recompute = tuple(
            share * max(0.0, self.kept - self.layer_input) * held
            for share, held in zip(recomputed, layers, strict=True)
        )
        by_offload = tuple(share * self.kept * held for share, held in zip(offloaded, layers, strict=True))
        stays = zip(activation, layers, by_recompute, by_offload, strict=True)
        held = {
            Share.FORWARD: tuple(max(0.0, all - (1 - self.kept) * some - r - o) for all, some, r, o in stays),
            Share.WEIGHTS: tuple(self.weight_share * held for held in layers),
            Share.RECOMPUTED: by_recompute,
            Share.OFFLOADED: by_offload,
        }
        return {"activation": activation, "held": held}
