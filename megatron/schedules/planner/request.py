"""What a person asks of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.placement import Placement


@dataclass(frozen=True)
class Request:
    """A schedule by name, for so many ranks and microbatches, under these costs.

    Args:
        schedule: one of :data:`megatron.schedules.planner.registry.NAMES`.
        ranks: d, the pipeline's size.
        microbatches: n.
        costs: of half a rank's layers, see :class:`Costs`.
        chunks: stages a rank holds, where the schedule leaves that open (``interleaved-1f1b``).
        csv: the text of a compute-only CSV, for ``file``.
        memory_limit: for ``adaptive``, of 1F1B's d microbatches on the rank that holds most.
        chunk_choices: for ``adaptive``, how many stages a rank may hold.
        placement: for ``adaptive``, where the stages live if that is settled: a run changes its microbatches, not this.
        search_seconds: for ``adaptive``, how long to search, in seconds of a usual core; see :mod:`.adaptive`.
        recompute, offload: for ``adaptive``, whether activations may be recomputed or offloaded where that makes the
            plan shorter; :func:`.memory_saving.relieve` settles which, and leaves neither to be settled.
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
    recompute: bool = False
    offload: bool = False
