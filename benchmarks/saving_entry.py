"""One entry of the benchmark of recompute and offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

if TYPE_CHECKING:
    from benchmarks.emulated_passes import Passes
    from megatron.schedules.runtime.activation_meter import ActivationMeter


class Entry(NamedTuple):
    """One contestant.

    Args:
        engine, schedule, memory_saving: name, order, and how memory is saved.
        limit: of 1F1B's memory; None where none was asked for.
        order: for the simulator.
        costs: in seconds.
        recomputed, offloaded: the part of all forwards that is recomputed, and of all activations that is offloaded.
        start: called on each rank, with what counts its tensors if anything does; gives what runs one iteration.
    """

    engine: str
    schedule: str
    memory_saving: str
    limit: float | None
    order: Schedule
    costs: StageCosts
    recomputed: float
    offloaded: float
    start: Callable[[Passes, ActivationMeter | None], Callable[[], None]]
