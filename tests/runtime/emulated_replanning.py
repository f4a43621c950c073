"""A job of ranks that sleep, one of which becomes slow: measured, told, and planned again for. Prints what came of it.

The recorder, the engine, the transport and the replanner are the real ones.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated_ours import _SPEC, SleepingStages, _channels, carry_out, settle
from benchmarks.emulated_passes import Passes
from benchmarks.emulated_ranks import begin_together, run_ranks
from benchmarks.uneven_layers import uneven
from megatron.schedules.measure.iteration_summary import rank_times
from megatron.schedules.measure.slow_ranks import SlowWatch
from megatron.schedules.planner.registry import plan
from megatron.schedules.planner.request import Request
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Program, channels_of
from megatron.schedules.runtime.control_messages import ControlMessages
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.recorder import HostClock, Recorder
from megatron.schedules.runtime.replanner import Replanner
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from tests.waiting import HANGS_S

RANKS, SLOW_RANK, SLOWER, FROM = 4, 3, 1.5, 4
LATENCY_MS = 0.2
ASKED = Request("adaptive", RANKS, 12, memory_limit=0.5, search_seconds=0.3, chunk_choices=(2,))


class Plans:
    """This rank's."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.running, self.program = schedule, lower(schedule, costs.on(schedule.placement))[dist.get_rank()]

    def prove(self, request: Request, schedule: Schedule) -> tuple[Program, ...]:
        programs = proved(schedule, request.costs.on(schedule.placement))
        return programs

    def adopt(self, request: Request, schedule: Schedule, proved: tuple[Program, ...]) -> None:
        self.running, self.program = schedule, proved[dist.get_rank()]


def equal(unit_ms: float) -> Costs:
    """Those of equal stages."""
    return Costs.of(unit_ms, 1.1 * unit_ms, 0.75 * unit_ms, LATENCY_MS)


def costs_of(unit_ms: float, slower: float) -> Costs:
    """The true ones."""
    weights = [1.0] * (2 * RANKS)
    weights[SLOW_RANK] = weights[-1 - SLOW_RANK] = slower
    return uneven(equal(unit_ms), weights)


def on_a_rank(first: Schedule, unit_ms: float, iterations: int) -> dict[str, Any]:
    """What this rank took and said."""
    true = {slower: costs_of(unit_ms, slower) for slower in (1.0, SLOWER)}
    around = dict.fromkeys(Kind, 0.0)
    seconds = {slower: _in_seconds(costs).on(first.placement) for slower, costs in true.items()}
    begin_together()
    carry_out(
        lower(first)[dist.get_rank()], SleepingStages(Passes(seconds[1.0], around), lower(first)[dist.get_rank()])
    )
    settle(lower(first), Passes(seconds[1.0], around))
    plans, recorder, watch = Plans(first, true[1.0]), Recorder(HostClock()), SlowWatch(first.placement.rank_of)
    said: list[str] = []
    store = dist.PrefixStore("replan", dist.distributed_c10d._get_default_store())
    ours = Replanner(plans, ControlMessages(store, "replan"), first=dist.get_rank() == 0, say=said.append)
    taken, ran, profile = [], [], False
    for iteration in range(iterations):
        passes = Passes(seconds[SLOWER if iteration >= FROM else 1.0], around)
        stages = SleepingStages(passes, plans.program)
        begin = begin_together()
        recorder.begin()
        run(plans.program, stages, Transport(_channels(channels_of(first.placement)), _SPEC), [recorder])
        recorder.end()
        taken.append((begin, time.monotonic()))
        ran.append(plans.running is first)
        spans = recorder.take() or []
        ours.boundary()
        stages_ms = _longest(rank_times(spans, first.placement.stages).stages)
        if profile:
            profile = False
            ours.start(replace(ASKED, costs=_measured(stages_ms, unit_ms)))
        for slow in watch.add(stages_ms):
            said.append(f"rank {slow.rank} is slow: {slow.ratio:.3f}")
            profile = True
    ours.close()
    return {"taken": taken, "said": said, "first": ran}


def _in_seconds(costs: Costs) -> Costs:
    return replace(costs, layers=costs.layers.scaled(lambda time: time / 1e3))


def _longest(stages: tuple[float, ...]) -> list[float]:
    tensor = torch.tensor(stages, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(each) for each in tensor.tolist()]


def _measured(stages: list[float], unit_ms: float) -> Costs:
    """What each stage's passes take, whose ratio to one another is known."""
    usual = ASKED.microbatches * (1 + 1.1 + 0.75) * unit_ms
    return uneven(equal(unit_ms), [time / usual for time in stages])


def main(unit_ms: float, iterations: int) -> None:
    """Print one JSON object."""
    costs = costs_of(unit_ms, 1.0)
    first = plan(replace(ASKED, costs=costs))
    ranks = run_ranks(RANKS, partial(on_a_rank, first, unit_ms, iterations), timeout=HANGS_S)
    both = [list(zip(*each, strict=True)) for each in zip(*(rank["taken"] for rank in ranks), strict=True)]
    slow = costs_of(unit_ms, SLOWER)
    best = plan(replace(ASKED, costs=slow, placement=first.placement))
    print(
        json.dumps(
            {
                "ms": [1e3 * (max(ends) - min(begins)) for begins, ends in both],
                "first": [rank["first"] for rank in ranks],
                "said": [rank["said"] for rank in ranks],
                "without": simulate(first, slow.on(first.placement)).makespan,
                "best": simulate(best, slow.on(first.placement)).makespan,
            }
        )
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
