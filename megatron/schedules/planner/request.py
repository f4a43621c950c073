"""A request to the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts


@dataclass(frozen=True)
class Request:
    """A schedule by name, for so many ranks and microbatches, under these costs.

    Args:
        schedule: one of :data:`megatron.schedules.planner.registry.NAMES`, or ``auto``.
        ranks: d, the pipeline's size.
        microbatches: n.
        costs: of half a rank's layers, see :class:`Costs`.
        chunks: stages a rank holds, where the schedule leaves that open (``interleaved-1f1b``).
        csv: the text of a compute-only CSV, for ``file``.
        memory_limit: for ``adaptive`` and ``auto``, of 1F1B's d microbatches on the rank that holds most.
        chunk_choices: for ``adaptive``, how many stages a rank may hold.
        placement: for ``adaptive``, where the stages live if that is settled: a run changes its microbatches, not this.
        search_seconds: for ``adaptive``, how long to search, in seconds of a usual core; see :mod:`.adaptive`.
        decisions: what is settled about the stages.
        partition: whether the layer partition is still to be searched (:func:`.layer_partition.partition_layers`).
            ``auto`` always searches it where the model is known and no partition is settled.
        recompute, offload: for ``adaptive``, whether it is still to be searched which stages recompute, and which
            offload, where that makes the plan shorter (:func:`.memory_saving.save_memory`).
    """

    schedule: str
    ranks: int
    microbatches: int
    costs: Costs = field(default_factory=Costs)
    chunks: int = 2
    csv: str | None = None
    memory_limit: float | None = None
    chunk_choices: tuple[int, ...] = (1, 2, 4)
    placement: Placement | None = None
    search_seconds: float | None = None
    decisions: Decisions = PLAIN
    partition: bool = False
    recompute: bool = False
    offload: bool = False

    def costs_on(self, placement: Placement) -> StageCosts:
        """What every stage of ``placement`` costs under what is settled."""
        return self.costs.on(placement, self.decisions)

    def layers_on(self, placement: Placement) -> tuple[int, ...] | None:
        """How many decoder layers each stage has; None where the model is not known."""
        return self.costs.layers_on(placement, self.decisions)

    def around_one(self) -> Request:
        """The same in numbers around 1: the same plan comes out whatever costs are measured in."""
        return replace(self, costs=self.costs.around_one()[0])
