"""Decisions of a plan about its stages: layer partition, recompute and offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class Decisions:
    """Layer partition, recompute and offload, by stage in model order.

    Args:
        layers: number of decoder layers of each stage; None for the most even partition.
        recomputed: part of each stage's layers that R passes recompute; None for no R passes.
        offloaded: part of each stage's layers whose activations O and L passes offload; None for no such passes.
    """

    layers: tuple[int, ...] | None = None
    recomputed: tuple[float, ...] | None = None
    offloaded: tuple[float, ...] | None = None

    @property
    def mean_savings(self) -> Mapping[str, float]:
        """Mean over all stages of the recomputed and of the offloaded part; without those that are None."""
        savings = {"recomputed": self.recomputed, "offloaded": self.offloaded}
        return {name: sum(shares) / len(shares) for name, shares in savings.items() if shares is not None}

    def savings_on(self, placement: Placement) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the recomputed and the offloaded part of each stage of ``placement``; 0 for None.

        Raises:
            PlanError: if the decisions are for another number of stages.
        """
        none = (0.0,) * placement.stages
        for name, shares in (("recomputed", self.recomputed), ("offloaded", self.offloaded)):
            if shares is not None and len(shares) != placement.stages:
                raise PlanError(f"shares of {len(shares)} stages given for {placement}", name)
        return self.recomputed or none, self.offloaded or none

    def saving(self, recomputed: Sequence[float], offloaded: Sequence[float]) -> Decisions:
        """Returns the same layer partition with these parts of each stage recomputed and offloaded."""
        return Decisions(
            self.layers,
            tuple(recomputed) if any(recomputed) else None,
            tuple(offloaded) if any(offloaded) else None,
        )


# Even layer partition without recompute and offload.
PLAIN = Decisions()
