"""Who takes part in the benchmark of recompute and offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule

if TYPE_CHECKING:
    from megatron.schedules.runtime.activation_meter import ActivationMeter
    from tools.benchmarks.emulated_passes import Passes


class Entry(NamedTuple):
    """Who takes part.

    Args:
        engine, schedule, relief: whose, which order, and what gives memory back.
        limit: of 1F1B's memory; None where none was asked for.
        order: for the simulator.
        costs: in seconds.
        start: called on each rank, with what counts its tensors if anything does; gives what runs one iteration.
    """

    engine: str
    schedule: str
    relief: str
    limit: float | None
    order: Schedule
    costs: Costs
    start: Callable[[Passes, ActivationMeter | None], Callable[[], None]]
