"""Schedules and costs for the tests of planning: written by hand, planned by name, or made by hypothesis."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

from hypothesis import settings
from hypothesis import strategies as st

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import PLAIN, Decisions
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from tests.programs.random_schedules import random_schedule
from tests.tiers import ALL_EXAMPLES

# What is planned from its name alone.
NAMED = [name for name in NAMES if name not in ("adaptive", "file")]

UNIT = "1,1,1,0"
# As measured on GPUs: a heavier input gradient, a lighter weight gradient, and link latencies above zero.
REAL = "1,1.1,0.75,0.05"


def examples(count: int) -> settings:
    """So many examples by night and a part of them by day, the same in every run, however slow a shared machine is."""
    part = settings.default.max_examples / ALL_EXAMPLES
    return settings(max_examples=max(1, round(count * part)), deadline=None, derandomize=True)


def written(placement: Placement, microbatches: int, *rows: str) -> Schedule:
    """A schedule written as one line of passes for each rank."""
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    return Schedule("written", placement, microbatches, order)


def timed(schedule: Schedule, costs: Costs | None = None, decisions: Decisions = PLAIN) -> Timeline:
    """The schedule's timeline, at unit costs unless others are given."""
    return simulate(schedule, (costs or Costs()).on(schedule.placement, decisions))


@lru_cache(maxsize=100)
def plan_and_seconds(name: str, ranks: int, microbatches: int, costs: str, chunks: int) -> tuple[Schedule, float]:
    """A named schedule and the processor time its planning took: other programs on the machine do not count."""
    started = time.process_time()
    schedule = plan(Request(name, ranks, microbatches, Costs.parse(costs), chunks))
    return schedule, time.process_time() - started


def planned(name: str, ranks: int, microbatches: int, costs: str = UNIT, chunks: int = 2) -> Timeline:
    """A named schedule timed under the costs it was planned for; kept for the tests that look at it next."""
    return timed(plan_and_seconds(name, ranks, microbatches, costs, chunks)[0], Costs.parse(costs))


def schedules(max_ranks: int = 4, max_microbatches: int = 5) -> st.SearchStrategy[Schedule]:
    """Valid schedules on any placement, sensible or not: I and W apart, together, or whole, mixed."""
    return st.builds(
        random_schedule,
        st.integers(0, 10**9),
        ranks=st.integers(1, max_ranks),
        microbatches=st.integers(1, max_microbatches),
    )


@st.composite
def costs_of(draw: st.DrawFn, placement: Placement) -> Costs:
    """Costs of any proportion, with and without link latency, messages of experts and stages that take or hold more."""
    length = st.integers(1, 12).map(lambda quarters: quarters / 4)
    by_stage = st.none() | st.lists(length, min_size=placement.stages, max_size=placement.stages).map(tuple)
    latency = st.sampled_from((0.0, 0.05, 1.0, 7.0))
    forward, input_grad, waiting = draw(length), draw(length), st.sampled_from((0.0, 0.0, 0.25, 1.0))
    again = draw(recomputing())
    messages = draw(waiting) * forward, draw(waiting) * input_grad
    layers = LayerTimes(forward, input_grad, draw(length), messages, stock_recompute=again.layers.stock_recompute)
    costs = replace(again, layers=layers, link=Link(draw(latency)))
    times, held = draw(by_stage), draw(by_stage)
    return uneven(costs, times or [1.0] * placement.stages, held) if times or held else costs


@st.composite
def recomputing(draw: st.DrawFn) -> Costs:
    """Unit costs that recompute nothing, all, or a part, and keep for W what they may, or more than F left."""
    share, left_to_w = st.sampled_from((0.0, 0.25, 1.0)), st.sampled_from((0.0, 0.25, 1.0, 1.75))
    again = Costs(
        LayerTimes(stock_recompute=draw(share)), memory=MemoryShares(kept=draw(share), weight_share=draw(left_to_w))
    )
    return draw(st.sampled_from((Costs(), again)))


@st.composite
def costed_schedules(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 5) -> tuple[Schedule, Costs]:
    """A valid schedule and costs for it."""
    schedule = draw(schedules(max_ranks, max_microbatches))
    return schedule, draw(costs_of(schedule.placement))
