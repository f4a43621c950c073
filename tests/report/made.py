"""Timelines made for the tests of the drawings."""

from __future__ import annotations

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.simulate import Timeline, simulate


def timeline(name: str, ranks: int, microbatches: int, costs: str = "1,1,1,0", **more: int) -> Timeline:
    """A named schedule, timed."""
    request = Request(name, ranks, microbatches, Costs.parse(costs), **more)
    schedule = plan(request)
    return simulate(schedule, request.costs.on(schedule.placement))
