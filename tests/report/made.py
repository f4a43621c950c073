"""Timelines made for the tests of the drawings."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.simulator import Timeline, simulate


def timeline(name: str, ranks: int, microbatches: int, costs: str = "1,1,1,0", **more: int) -> Timeline:
    """A named schedule, timed."""
    request = Request(name, ranks, microbatches, Costs.parse(costs), **more)
    schedule = plan(request)
    return simulate(schedule, request.costs_on(schedule.placement))


def saved(ranks: int = 4, microbatches: int = 8, *, one_way: bool = False) -> Timeline:
    """V-Half in which each first chunk is offloaded and each second one recomputed, in full."""
    schedule = timeline("v-half", ranks, microbatches).schedule
    first = [float(stage < ranks) for stage in range(2 * ranks)]
    costs = Costs(copies=HostCopies(0.75, one_way), memory=MemoryShares(layer_input=0.0))
    decisions = Decisions(recomputed=tuple(1 - each for each in first), offloaded=tuple(first))
    rows = tuple(tuple(each for work in row for each in _with_saving(work, ranks)) for row in schedule.order)
    return simulate(replace(schedule, name="file", order=rows), costs.on(schedule.placement, decisions))


def _with_saving(work: Pass, ranks: int) -> list[Pass]:
    """``work``, the second chunk's I after its R, and the first chunk's copies where they hold up little."""
    stage, kind, m = work
    if kind in (Kind.I, Kind.B):
        return [Pass(stage, Kind.L if stage < ranks else Kind.R, m), work]
    return [work, Pass(stage, Kind.O, m)] if kind is Kind.F and stage < ranks else [work]
