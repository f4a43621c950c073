#!/usr/bin/env python3
"""Runs the plans of recorded jobs with passes that sleep for their planned time, and compares iteration times.

    python scripts/emulate_plans.py v-half=.demo/v-half-timeline/recorded.json 1f1b=.demo/1f1b-timeline/recorded.json

The engine and its messages are those of a training. Each rank is a process, and sleeping takes no core, so ranks do
not slow one another down, as if each had a device of its own. The last plan is the baseline.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.printable import printable
from scripts.compare_logs import aligned
from tools._parsing import Parser

if TYPE_CHECKING:
    from megatron.schedules.programs.program import Program
    from megatron.schedules.schedule.simulator import Timeline
    from megatron.schedules.schedule.stage_costs import StageCosts

_REPETITIONS = 4
_SETTLING = 2  # iterations of each plan before those that count
_START_S = 5.0  # importing torch, starting ranks
_EMULATED = frozenset("FIWBST")


class Emulated(NamedTuple):
    """One plan, carried out.

    planned, seconds: iteration time as planned and as measured (the median), in seconds.
    bubble, planned_bubble: the share of the iteration time in which an average rank computes nothing.
    """

    name: str
    planned: float
    seconds: float
    planned_bubble: float

    @property
    def bubble(self) -> float:
        """The measured bubble; passes take their planned time."""
        return 1 - (1 - self.planned_bubble) * self.planned / self.seconds


def emulate(plans: Sequence[tuple[str, Timeline]], seconds: float) -> list[Emulated]:
    """Carries out each plan several times by turns, in about so many seconds; plans have the same unit of time.

    Raises:
        PlanError: if a plan cannot be emulated.
    """
    from benchmarks.emulated_ranks import run_ranks
    from megatron.schedules.programs.checker import proved

    ranks = {timeline.schedule.ranks for _, timeline in plans}
    if len(ranks) > 1:
        raise PlanError(f"the plans are for {' and '.join(map(str, sorted(ranks)))} ranks: give plans of equal size")
    for name, timeline in plans:
        if found := {each.kind.value for row in timeline.schedule.order for each in row} - _EMULATED:
            raise PlanError(f"{name} has passes of kind {', '.join(sorted(found))}, which are not emulated")
    whole = sum(timeline.makespan for _, timeline in plans) * (_REPETITIONS + _SETTLING)
    unit = max(seconds - _START_S, 0.5) / whole
    bodies: list[tuple[Sequence[Program], StageCosts]] = []
    for _, timeline in plans:
        programs = proved(timeline.schedule, timeline.costs)
        times = {kind: tuple(unit * time for time in of_kind) for kind, of_kind in timeline.costs.times.items()}
        bodies.append((programs, replace(timeline.costs, times=times)))
    taken = run_ranks(ranks.pop(), partial(_on_a_rank, bodies), timeout=10 * seconds + 60)
    lengths = [
        max(ends) - min(begins) for begins, ends in (zip(*spans, strict=True) for spans in zip(*taken, strict=True))
    ]
    return [
        Emulated(name, unit * timeline.makespan, statistics.median(lengths[at :: len(plans)]), timeline.bubble)
        for at, (name, timeline) in enumerate(plans)
    ]


def _on_a_rank(bodies: Sequence[tuple[Sequence[Program], StageCosts]]) -> list[tuple[float, float]]:
    """Begin and end of every iteration on this rank: all plans once, then all again."""
    from benchmarks import emulated_ours
    from benchmarks.emulated_passes import Passes
    from benchmarks.emulated_ranks import begin_together
    from megatron.schedules.schedule.kinds import Kind

    iterations = []
    for programs, costs in bodies:
        passes = Passes(costs, dict.fromkeys(Kind, 0.0))
        begin_together()
        emulated_ours.settle(programs, passes, statistics.median)
        iterations.append(emulated_ours.start(programs, passes))
    spans = []
    for _ in range(_REPETITIONS):
        for iteration in iterations:
            begin = begin_together()
            iteration()
            spans.append((begin, time.monotonic()))
    return spans


def table(found: Sequence[Emulated]) -> str:
    """Iteration times and bubbles as text, and what they come to."""
    base = found[-1]
    lines = [["", *(each.name for each in found), *(f"{each.name} / {base.name}" for each in found[:-1])]]
    for title, values in (
        ("iteration time, planned", [each.planned for each in found]),
        ("iteration time, passes asleep", [each.seconds for each in found]),
    ):
        ratios = (f"{value / values[-1]:.2f}" for value in values[:-1])
        lines.append([title, *(f"{value:.3f} s" for value in values), *ratios])
    for title, values in (
        ("bubble, planned", [each.planned_bubble for each in found]),
        ("bubble, passes asleep", [each.bubble for each in found]),
    ):
        lines.append([title, *(f"{100 * value:.1f} %" for value in values), *("" for _ in found[:-1])])
    return aligned(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plans", nargs="+", metavar="NAME=FILE", help="a name, and the recorded.json of a job")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long all of it may take; default: 20")
    arguments = parser.parse_args(argv)
    from megatron.schedules.measure.recorded_run import read_recorded

    try:
        plans = []
        for argument in arguments.plans:
            name, _, path = argument.partition("=")
            if not (name and path):
                raise PlanError(f"{argument}: write NAME=FILE")
            plans.append((printable(name), read_recorded(Path(path)).planned))
        found = emulate(plans, arguments.seconds)
    except PlanError as error:
        parser.error(one_line(str(error)))
    print(table(found))
    base = found[-1]
    for each in found[:-1]:
        print(f"{each.name} would train {base.seconds / each.seconds:.2f} x as fast as {base.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
