"""Runs the entries of the memory saving benchmark on their ranks. Importing this imports Megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import emulated_stock, saving_stages
from benchmarks.emulated_engines import Contestant, measure
from benchmarks.emulated_passes import Passes
from benchmarks.emulated_ranks import begin_together, run_ranks
from benchmarks.saving_entry import Entry
from benchmarks.saving_tensors import StockLayers
from megatron.schedules.programs.checker import proved
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

Start = Callable[[Passes, ActivationMeter | None], Callable[[], None]]

_COUNTING_PACE = 0.05


def start_stock(
    placement: Placement,
    microbatches: int,
    rank_bytes: int,
    layer_bytes: int,
    passes: Passes,
    meter: ActivationMeter | None,
) -> Callable[[], None]:
    """Returns stock's own function on stages that keep real tensors."""

    def layers(passes: Passes, stage: int) -> StockLayers:
        return StockLayers(passes, stage, rank_bytes, layer_bytes, meter)

    return emulated_stock.start(placement, microbatches, passes, layers)


def start_ours(schedule: Schedule, costs: StageCosts, rank_bytes: int) -> Start:
    """Returns our engine with ``schedule``, lowered for ``costs``."""
    programs = proved(schedule, costs)
    return partial(saving_stages.start, programs, rank_bytes)


def timed(entries: Sequence[Entry], repetitions: int, timeout: float) -> list[list[float]]:
    """Returns the seconds of each repetition, by entry; one of them is our ``v-zb``."""
    contestants = [
        Contestant(each.engine, each.schedule, each.order, partial(_uncounted, each.start)) for each in entries
    ]
    return measure(contestants, [each.costs for each in entries], repetitions, timeout)


def _uncounted(start: Start, passes: Passes) -> Callable[[], None]:
    return start(passes, None)


def peaks(entries: Sequence[Entry], timeout: float) -> list[list[int]]:
    """Returns each rank's peak bytes of activations, by entry, in a quick iteration."""
    found = run_ranks(entries[0].order.ranks, partial(_counted, entries), timeout)
    return [list(ranks) for ranks in zip(*found, strict=True)]


def _counted(entries: Sequence[Entry]) -> list[int]:
    found = []
    for each in entries:
        meter = ActivationMeter()
        passes = Passes(each.costs, dict.fromkeys(Kind, 0.0))
        passes.pace = _COUNTING_PACE
        run = each.start(passes, meter)
        begin_together()
        run()
        found.append(meter.peak)
    return found
