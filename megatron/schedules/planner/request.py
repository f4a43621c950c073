"""A request to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, whole_peaks
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import EPSILON


@dataclass(frozen=True)
class Request:
    """A request for a plan: a schedule by name, its size and the costs.

    Args:
        schedule: one of :data:`megatron.schedules.planner.registry.NAMES`, or ``auto``.
        ranks: number of pipeline ranks, d.
        microbatches: microbatches per iteration, n.
        costs: times and sizes of half a rank's layers, see :class:`Costs`.
        chunks: chunks per rank, for schedules that leave it open (``interleaved-1f1b``).
        csv: text of a compute-only CSV, for ``file``.
        csv_name: name of that file, in headings and errors.
        memory_limit: for ``adaptive`` and ``auto``, the activation memory of the worst rank, as a fraction of 1F1B's
            d microbatches.
        recompute_room: memory that ``memory_limit`` leaves free for Megatron's own recompute in backward passes, as a
            fraction of 1F1B's.
        chunk_choices: for ``adaptive``, the allowed numbers of chunks per rank.
        placement: for ``adaptive``, a fixed placement; None to search it. A running job cannot change its placement.
        start: for ``adaptive``, a schedule that the search may start from, such as one that the search for the layer
            partition found. The plan is never longer than it if it fits.
        search_seconds: for ``adaptive``, search time in seconds on a typical core; see :mod:`.adaptive`.
        decisions: settled decisions about the stages.
        partition: True to search the layer partition (:func:`.layer_partition.partition_layers`). ``auto`` always
            searches it if the model is known and no partition is settled.
        divides: for ``auto``, True if only ``chunk_choices`` divide the layers, so that schedules by name need one of
            them too.
        recompute: for ``adaptive``, True to search which stages recompute (:func:`.memory_saving.save_memory`).
        offload: for ``adaptive``, True to search which stages offload. Both are used only if the plan gets shorter.
        alike: True to split all backwards or none, because CUDA graphs are captured for split ones and others apart.
            A CSV stays as it is.
    """

    schedule: str
    ranks: int
    microbatches: int
    costs: Costs = field(default_factory=Costs)
    chunks: int = 2
    csv: str | None = None
    csv_name: str = "file"
    memory_limit: float | None = None
    recompute_room: float = 0.0
    chunk_choices: tuple[int, ...] = (1, 2, 4)
    placement: Placement | None = None
    start: Schedule | None = None
    search_seconds: float | None = None
    decisions: Decisions = PLAIN
    partition: bool = False
    divides: bool = False
    recompute: bool = False
    offload: bool = False
    alike: bool = False

    def costs_on(self, placement: Placement) -> StageCosts:
        """Costs of each stage of ``placement`` under the settled decisions."""
        return self.costs.on(placement, self.decisions)

    def layers_on(self, placement: Placement) -> tuple[int, ...] | None:
        """Decoder layers of each stage; None if the model is unknown."""
        return self.costs.layers_on(placement, self.decisions)

    def peak_bytes(self, timeline: Timeline) -> float | None:
        """Peak activation memory of the worst rank in ``timeline``, bytes; None if the model's sizes are unknown."""
        memory = self.costs.in_bytes
        if memory is None:
            return None
        return memory.of_rank(self.ranks) * max(whole_peaks(timeline.schedule, timeline.costs))

    @property
    def limit_bytes(self) -> float | None:
        """The memory limit of a rank's activations, bytes; None without a limit, or if sizes are unknown."""
        memory = self.costs.in_bytes
        if self.memory_limit is None or memory is None:
            return None
        return self.memory_limit * self.ranks * memory.of_rank(self.ranks)

    def allows(self, timeline: Timeline) -> bool:
        """Checks that a schedule by name keeps within the memory limit.

        It may have another placement and other layers than this request: its own costs say what it holds. Parameters
        count only if the limit is that of a device.
        """
        if self.memory_limit is None:
            return True
        schedule, costs = timeline.schedule, timeline.costs
        limit, room = self.memory_limit * self.ranks + EPSILON, self.recompute_room * self.ranks

        def needed(peaks: Sequence[float]) -> float:
            return costs.within(schedule.placement, peaks) if costs.of_device else max(peaks)

        # A plan's peak is often between backward passes, when nothing is recomputed.
        return needed(timeline.peaks) <= limit or needed(whole_peaks(schedule, costs)) <= limit + room

    def around_one(self) -> Request:
        """Returns the request with costs scaled to around 1, so that plans do not depend on their unit."""
        return replace(self, costs=self.costs.around_one())


def of_1f1b(size: float, ranks: int, microbatch: float) -> float:
    """Returns ``size`` as a fraction of the activation memory of 1F1B, whose first rank holds ``ranks`` microbatches.

    Args:
        size: bytes of activations.
        ranks: number of pipeline ranks.
        microbatch: bytes of one microbatch in an average rank's layers.
    """
    return size / (ranks * microbatch)
