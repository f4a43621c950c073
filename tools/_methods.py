"""Ways to train that the grid search compares."""

from __future__ import annotations

from typing import NamedTuple


class Method(NamedTuple):
    """A way to train.

    Args:
        name: name in tables.
        schedule: name of the schedule in this package.
        chunks: stages of a rank; 0 if they are searched.
        memory_limit: for ``adaptive``, a fraction of 1F1B's activation memory; None for all that fits the device.
        shared: true under vocabulary parallelism.
        may_recompute, may_offload: for ``adaptive``, true if the plan may recompute layers, or offload activations.
        is_stock: true if stock Megatron has this schedule, with its own CUDA graphs and overlap.
    """

    name: str
    schedule: str
    chunks: int
    memory_limit: float | None = None
    shared: bool = False
    may_recompute: bool = False
    may_offload: bool = False
    is_stock: bool = False

    @property
    def is_searched(self) -> bool:
        """True if the planner searches the order."""
        return self.schedule == "adaptive"

    @property
    def saves_memory(self) -> bool:
        """True if the plan may recompute or offload layers."""
        return self.may_recompute or self.may_offload

    def sharing(self) -> Method:
        """Returns the same method with vocabulary parallelism, which stock does not have."""
        return self._replace(name=f"{self.name}, shared", shared=True, is_stock=False)


ONE_F_ONE_B = Method("1F1B", "1f1b", 1, is_stock=True)
INTERLEAVED = Method("interleaved", "interleaved-1f1b", 0, is_stock=True)
METHODS = (
    ONE_F_ONE_B,
    INTERLEAVED,
    Method("ZB-1P", "zb-1p", 1),
    Method("V-Min", "v-min", 2),
    Method("V-Half", "v-half", 2),
    Method("V-ZB", "v-zb", 2),
)
ADAPTIVE = Method("adaptive", "adaptive", 2)
SAVING = (
    ADAPTIVE._replace(name="adaptive with recompute", may_recompute=True),
    ADAPTIVE._replace(name="adaptive with offload", may_offload=True),
    ADAPTIVE._replace(name="adaptive with both", may_recompute=True, may_offload=True),
)
