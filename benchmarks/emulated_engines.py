"""The engines of the emulation and their timing. Importing this imports Megatron."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from benchmarks import emulated_ours, emulated_stock, emulated_torch
from benchmarks.emulated_passes import Passes
from benchmarks.emulated_ranks import begin_together, run_ranks
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Program
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import MicrobatchLoads, StageCosts

OURS = ("1f1b", "interleaved-1f1b", "zb-1p", "v-min", "v-half", "v-zb")
LIMITS = (0.5, 1.0)
"""Memory limits of our adaptive schedule, as shares of 1F1B's memory."""

_SETTLING = "v-zb"  # what all ranks run to find how long to sleep: it has every kind of pass
_WARM_UP_PACE = 0.05

Start = Callable[[Sequence[Program], Passes], Callable[[], None]]
"""Called on each rank with all ranks' programs, gives what runs one iteration."""


class Contestant(NamedTuple):
    """One schedule of one engine.

    Args:
        engine, name: whose it is, and what they call it.
        schedule: its order, for the simulator.
        start: called on each rank, gives what runs one iteration.
        loads: what its microbatches cost; None where they are alike.
    """

    engine: str
    name: str
    schedule: Schedule
    start: Callable[[Passes], Callable[[], None]]
    loads: MicrobatchLoads | None = None


def ours(request: Request) -> list[Contestant]:
    """Returns our named schedules, planned for the costs of ``request``."""
    return [of_ours(name, replace(request, schedule=name)) for name in OURS]


def adaptive(request: Request) -> list[Contestant]:
    """Returns our adaptive schedule within each of :data:`LIMITS`, for the costs of ``request``."""
    asked = replace(request, schedule="adaptive")
    return [of_ours(f"adaptive {limit:g}", replace(asked, memory_limit=limit)) for limit in LIMITS]


def of_ours(name: str, request: Request, start: Start = emulated_ours.start) -> Contestant:
    """Returns our engine with the plan for ``request``; ``start`` runs its programs on a rank's passes."""
    schedule = plan(request)
    return of_plan(name, schedule, request.costs_on(schedule.placement), start)


def of_plan(name: str, schedule: Schedule, costs: StageCosts, start: Start = emulated_ours.start) -> Contestant:
    """Returns our engine with ``schedule``, lowered for ``costs``."""
    programs = proved(schedule, costs)
    return Contestant("ours", name, schedule, partial(start, programs))


def others(by_name: Sequence[Contestant]) -> list[Contestant]:
    """Returns what stock and torch can run at the size of :func:`ours`; stock's 1F1B comes first."""
    one, two = (_named(by_name, name).schedule for name in ("1f1b", "interleaved-1f1b"))
    d, n = one.ranks, one.microbatches
    found = [
        stocks("1F1B", one),
        Contestant("torch", "1F1B", one, partial(emulated_torch.start, emulated_torch.ONE_CHUNK, one.placement, n)),
    ]
    if n % d == 0:  # else they refuse
        found.insert(1, stocks("interleaved", two))
        for name, (kind, _) in emulated_torch.TWO_CHUNKS.items():
            order = emulated_torch.order(name, d, n)
            found.append(Contestant("torch", name, order, partial(emulated_torch.start, kind, order.placement, n)))
    return found


def stocks(name: str, schedule: Schedule) -> Contestant:
    """Returns stock's own schedule function with the order of ``schedule``."""
    start = partial(emulated_stock.start, schedule.placement, schedule.microbatches)
    return Contestant("megatron-core", name, schedule, start)


def _named(found: Sequence[Contestant], name: str) -> Contestant:
    """Returns our schedule of that name."""
    return next(one for one in found if (one.engine, one.name) == ("ours", name))


def measure(
    found: Sequence[Contestant], costs: Sequence[StageCosts], repetitions: int, timeout: float
) -> list[list[float]]:
    """Returns the seconds of every repetition of each of ``found``, which must include our ``v-zb``.

    The repetitions go round: whatever else the machine does meanwhile, it does to all of them.
    """
    settling = next(one for one in zip(found, costs, strict=True) if one[0][:2] == ("ours", _SETTLING))
    taken = run_ranks(found[0].schedule.ranks, partial(_on_a_rank, found, costs, settling, repetitions), timeout)
    seconds: list[list[float]] = [[] for _ in found]
    for at in range(repetitions * len(found)):
        begins, ends = zip(*(of_rank[at] for of_rank in taken), strict=True)
        seconds[at % len(found)].append(max(ends) - min(begins))
    return seconds


def _on_a_rank(
    found: Sequence[Contestant], costs: Sequence[StageCosts], settling: tuple[Contestant, StageCosts], repetitions: int
) -> list[tuple[float, float]]:
    """Returns begin and end of every iteration on this rank, after a quick warm-up of each engine."""
    begin_together()
    around = dict.fromkeys(Kind, 0.0)
    emulated_ours.settle(lower(settling[0].schedule), Passes(settling[1], around))
    runs = []
    for contestant, own in zip(found, costs, strict=True):
        passes = Passes(replace(own, loads=contestant.loads), around)
        runs.append(contestant.start(passes))
        passes.pace = _WARM_UP_PACE
        begin_together()
        runs[-1]()
        passes.pace = 1.0
    taken = []
    for _ in range(repetitions):
        for run in runs:
            begin = begin_together()
            run()
            taken.append((begin, time.monotonic()))
    return taken
