"""What a plan settles about the stages of its placement besides the order of passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class Decisions:
    """Layer partition, recompute and offload, by stage in model order.

    Args:
        layers: decoder layers of each stage; None for as even as whole layers go.
        recomputed: the part of each stage's layers that R passes recompute; None for no R passes.
        offloaded: the part of each stage's layers whose activations O and L passes offload; None for none of these.
    """

    layers: tuple[int, ...] | None = None
    recomputed: tuple[float, ...] | None = None
    offloaded: tuple[float, ...] | None = None

    @property
    def mean_savings(self) -> Mapping[str, float]:
        """The recomputed and the offloaded part of all stages together, where there is any."""
        savings = {"recomputed": self.recomputed, "offloaded": self.offloaded}
        return {name: sum(each) / len(each) for name, each in savings.items() if each is not None}

    def savings_on(self, placement: Placement) -> tuple[Sequence[float], Sequence[float]]:
        """The recomputed and the offloaded part of each stage of ``placement``, 0 where nothing was decided.

        Raises:
            PlanError: where the decisions are for another number of stages.
        """
        none = (0.0,) * placement.stages
        for name, shares in (("recomputed", self.recomputed), ("offloaded", self.offloaded)):
            if shares is not None and len(shares) != placement.stages:
                raise PlanError(f"shares of {len(shares)} stages given for {placement}", name)
        return self.recomputed or none, self.offloaded or none

    def saving(self, recomputed: Sequence[float], offloaded: Sequence[float]) -> Decisions:
        """The same layers with these parts of each stage recomputed and offloaded."""
        return Decisions(
            self.layers,
            tuple(recomputed) if any(recomputed) else None,
            tuple(offloaded) if any(offloaded) else None,
        )


# Even layers, nothing recomputed or offloaded.
PLAIN = Decisions()
