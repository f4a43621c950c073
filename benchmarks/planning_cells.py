"""The measurements of the planning benchmark, one cell at a time: figures of plans, as plain data."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.adaptive import bound, default_seconds, effort, least_limit, placements
from megatron.schedules.planner.memory_saving import save_memory
from megatron.schedules.planner.registry import Request, every_named, plan
from megatron.schedules.schedule.cost_parts import HostCopies
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.frontier import frontier
from megatron.schedules.search.problem import Problem
from megatron.schedules.utils import private_folder

Result = dict[str, Any]
_EPSILON = 1e-9


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        kind: ``frontier`` (a ladder of memory limits), ``memory_saving`` (one limit, with recompute or offload),
            ``random`` (one plan of a random problem) or ``time``.
        ranks, microbatches: the size; of a random problem they follow from the seed.
        costs: F,I,W,COMM.
        up_to: the largest memory limit, in microbatches (``frontier``) or of 1F1B's (``memory_saving``, ``time``).
        seconds: how long to search, in nominal seconds; 0 for the default.
        seed: of a random problem.
        recompute: whether forwards may be recomputed.
        copy: how long the activations of half a rank's layers take to the host, one way; 0 where they stay.
    """

    kind: str
    ranks: int = 0
    microbatches: int = 0
    costs: str = ""
    up_to: float = 0.0
    seconds: float = 0.0
    seed: int = 0
    recompute: bool = False
    copy: float = 0.0

    def __str__(self) -> str:
        if self.kind == "random":
            return f"random {self.seed}"
        budget = f" in {self.seconds:g} s" if self.seconds else ""
        budget += " with recompute" * self.recompute + (f" with copies of {self.copy:g}" if self.copy else "")
        return f"{self.kind} d={self.ranks} n={self.microbatches} costs={self.costs} up to {self.up_to:g}{budget}"


def code_version() -> str:
    """Returns a version of the code that the figures depend on."""
    return hashlib.sha256(Path(__file__).read_bytes() + private_folder.code_version().encode()).hexdigest()[:16]


def measure(cell: Cell) -> Result:
    """Returns the figures of ``cell``, with the processor time that they took."""
    _warm_up()
    started = time.process_time()
    result = _MEASURES[cell.kind](cell)
    return {**result, "seconds": time.process_time() - started}


def _frontier(cell: Cell) -> Result:
    """Returns every memory limit of the ladder, and the named schedules."""
    request = Request("adaptive", cell.ranks, cell.microbatches, Costs.parse(cell.costs))
    costs = request.costs.around_one()
    unit, request = request.costs.layers.forward / costs.layers.forward, replace(request, costs=costs)
    named = every_named(request)
    problems = [Problem(placement, cell.microbatches, costs.on(placement)) for placement in placements(request)]
    seconds = cell.seconds or default_seconds(cell.ranks, cell.microbatches)
    rungs = []
    for rung in frontier(problems, named, cell.up_to, effort(cell.ranks, seconds)):
        validate(rung.timeline.schedule)
        rungs.append(
            {
                **_figures(rung.timeline, unit),
                "limit": rung.limit,
                "chunks": rung.timeline.schedule.placement.chunks,
                "bubble_bound": 1 - rung.timeline.ideal / rung.bound,
            }
        )
    return {"rungs": rungs, "named": [_figures(timeline, unit) for timeline in named]}


def _memory_saving(cell: Cell) -> Result:
    """Returns one plan with recomputed and offloaded layers."""
    costs = replace(Costs.parse(cell.costs), copies=HostCopies(cell.copy))
    asked = Request("adaptive", cell.ranks, cell.microbatches, costs, memory_limit=cell.up_to)
    seconds = cell.seconds or default_seconds(cell.ranks, cell.microbatches)
    asked = replace(asked, recompute=cell.recompute, offload=cell.copy > 0, search_seconds=seconds)
    request = save_memory(asked)
    schedule = plan(request)
    timeline, savings = simulate(schedule, request.costs_on(schedule.placement)), request.decisions.mean_savings
    parts = {"recomputed": savings.get("recomputed", 0.0), "offloaded": savings.get("offloaded", 0.0)}
    within = timeline.peak <= cell.up_to * cell.ranks + _EPSILON
    shares = {"useful": timeline.useful, "copying": timeline.copying, "within": within}
    return _figures(timeline, 1.0) | parts | shares | {"chunks": schedule.placement.chunks}


def _random(cell: Cell) -> Result:
    """Returns one plan of a random problem, against the named schedules within the same memory."""
    request = drawn(cell.seed)
    assert request.memory_limit is not None
    limit = request.memory_limit * request.ranks
    schedule = plan(request)  # validates it
    ours = simulate(schedule, request.costs_on(schedule.placement))
    fitting = [timeline for timeline in every_named(request) if timeline.peak <= limit + _EPSILON]
    best = min((timeline.makespan for timeline in fitting), default=None)
    return {
        **_figures(ours, 1.0),
        "ranks": request.ranks,
        "microbatches": request.microbatches,
        "limit": limit,
        "within": ours.peak <= limit + _EPSILON,
        "named": best,
        "bound": bound(request),
    }


def drawn(seed: int) -> Request:
    """Returns a random size, costs, uneven stages and a memory limit."""
    lot = random.Random(seed)
    ranks = lot.randint(2, 24)
    microbatches = lot.randint(1, 3 * ranks)
    forward, input_grad, weight_grad = (3 ** lot.uniform(-0.5, 0.5) for _ in range(3))
    weights = tuple(lot.uniform(0.6, 1.4) for _ in range(4 * ranks))
    held = tuple(lot.uniform(0.7, 1.3) for _ in range(4 * ranks)) if lot.random() < 0.5 else None
    costs = uneven(Costs.of(forward, input_grad, weight_grad, lot.choice((0.0, 0.05, 0.2))), weights, held)
    request = Request("adaptive", ranks, microbatches, costs)
    # The limit is drawn in layers of the expected memory; the request's unit is the mean of those drawn.
    unit = statistics.fmean(held or (1.0,))
    least = unit * least_limit(request) + 1e-6
    return replace(request, memory_limit=lot.uniform(least, max(least, 1.25)) / unit)


def _time(cell: Cell) -> Result:
    """Returns a plan as a user gets it, named schedules included."""
    costs = Costs.parse(cell.costs)
    schedule = plan(Request("adaptive", cell.ranks, cell.microbatches, costs, memory_limit=cell.up_to))
    return _figures(simulate(schedule, costs.on(schedule.placement)), 1.0)


def _figures(timeline: Timeline, unit: float) -> Result:
    """Returns the figures of the tables; ``unit`` is that of the times."""
    return {
        "name": timeline.schedule.name,
        "bubble": timeline.bubble,
        "peak": timeline.peak,
        "makespan": timeline.makespan * unit,
    }


def _warm_up() -> None:
    """Compiles, or loads compiled code, before the timing."""
    plan(Request("adaptive", 2, 2, memory_limit=1.0, search_seconds=0.001))


_MEASURES: dict[str, Callable[[Cell], Result]] = {
    "frontier": _frontier,
    "memory_saving": _memory_saving,
    "random": _random,
    "time": _time,
}
