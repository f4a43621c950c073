"""The cost of timing every pass, and the accuracy of the times: emulated iterations with and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.parts import Claim, Part, Row, Say, Statistics, markdown_table
from megatron.schedules.measure.clocks import aligned, gaps, latencies
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule

if TYPE_CHECKING:
    from megatron.schedules.programs.program import Program

UNIT_S = 0.010
COSTS = Costs.of(1, 1.1, 0.75)
SCHEDULES = ("1f1b", "zb-1p", "v-half")
RANKS, MICROBATCHES = 4, 16
_REPETITIONS = 10


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each schedule."""
    for name in SCHEDULES[-1:] if quick else SCHEDULES:
        say(f"recording: {name} on {RANKS} ranks, with and without by turns")
        yield row(Request(name, RANKS, MICROBATCHES, COSTS), 3 if quick else _REPETITIONS)


def row(request: Request, repetitions: int, unit: float = UNIT_S) -> Row:
    """Returns one schedule's seconds without and with, their ratios, and the error of the medians.

    Args:
        request: the schedule, and the times of its passes in units.
        repetitions: iterations each way.
        unit: seconds.
    """
    from benchmarks.emulated_ranks import run_ranks
    from megatron.schedules.programs.checker import proved

    schedule, asked = plan(request), request.costs
    costs = Costs.of(*(unit * time for time in asked.layers.passes))
    programs = proved(schedule, costs.on(schedule.placement))
    return figures(
        schedule, run_ranks(request.ranks, partial(_on_a_rank, schedule, programs, costs, repetitions), timeout=600)
    )


_Told = tuple[tuple[list[tuple[float, float]], ...], list[float], list[list[tuple[float, float]]]]
"""By one rank: begin and end in seconds of each iteration without and with, how far each stage's medians are off, and
start and end in milliseconds of all passes of each iteration, by its own clock."""


def figures(schedule: Schedule, told: Sequence[_Told]) -> Row:
    """Returns the figures of all ranks as a row."""
    repetitions = len(told[0][2])
    without, recorded = (
        [
            max(rank[way][at][1] for rank, _, _ in told) - min(rank[way][at][0] for rank, _, _ in told)
            for at in range(repetitions)
        ]
        for way in (0, 1)
    )
    errors = [error for _, found, _ in told for error in found]
    spans = [[rank[at] for _, _, rank in told] for at in range(repetitions)]
    starts = [([[s for s, _ in rank] for rank in each], [[e for _, e in rank] for rank in each]) for each in spans]
    links = latencies([gaps(schedule, *each) for each in starts])
    lengths = [max(row[-1] for row in aligned(schedule, *each).end) / 1e3 for each in starts]
    return {
        "schedule": schedule.name,
        "without_s": Statistics.of(without)._asdict(),
        "recorded_s": Statistics.of(recorded)._asdict(),
        "ratio": Statistics.of([b / a for a, b in zip(without, recorded, strict=True)])._asdict(),
        "worst_pass_error": max(errors, key=abs),
        "latency_ms": Statistics.of(list(links.values()))._asdict(),
        "aligned_length_over_wall": Statistics.of([a / b for a, b in zip(lengths, recorded, strict=True)])._asdict(),
    }


def _on_a_rank(schedule: Schedule, programs: Sequence[Program], costs: Costs, repetitions: int) -> _Told:
    import torch.distributed as dist

    from benchmarks import emulated_ours
    from benchmarks.emulated_passes import Passes
    from benchmarks.emulated_ranks import begin_together
    from megatron.schedules.measure.measured_passes import rank_measured
    from megatron.schedules.runtime.recorder import HostClock, Recorder
    from megatron.schedules.schedule.kinds import Kind

    begin_together()
    around = dict.fromkeys(Kind, 0.0)
    passes = Passes(costs.on(schedule.placement), around)
    emulated_ours.settle(programs, passes, statistics.median)  # as medians are looked at
    recorder = Recorder(HostClock())
    runs = [emulated_ours.start(programs, passes), emulated_ours.start(programs, passes, [recorder])]
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(repetitions):
        for way in (0, 1):
            begin = begin_together()
            if way:
                recorder.begin()
            runs[way]()
            if way:
                recorder.end()
            taken[way].append((begin, time.monotonic()))
    spans = [recorder.take() or [] for _ in range(repetitions)]
    found = rank_measured(dist.get_rank(), [tuple(span) for each in spans for span in each], [], [], {})  # type: ignore[misc]
    errors = [times.median / (1e3 * passes.seconds(kind, stage)) - 1 for (stage, kind), times in found.times.items()]
    return taken, errors, [[(span.start, span.end) for span in each] for each in spans]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns no claims: the table shows cost and accuracy of recording."""
    return []


def section(rows: Sequence[Row]) -> str:
    """Returns the meaning of the columns, and a table."""

    def percent(share: float) -> str:
        return f"{100 * share:+.2f} %"

    def cells(found: Row) -> list[str]:
        ratio: dict[str, Any] = found["ratio"]
        return [
            found["schedule"],
            f"{found['without_s']['median']:.3f}",
            f"{percent(ratio['median'] - 1)} ({percent(ratio['low'] - 1)} to {percent(ratio['high'] - 1)})",
            percent(found["worst_pass_error"]),
            percent(found["aligned_length_over_wall"]["median"] - 1),
        ]

    heads = ["", "iteration, s", "longer when recorded", "worst error of a stage's median", "error of the iteration"]
    return (
        f"Iterations on {RANKS} emulated ranks with {MICROBATCHES} microbatches, recorded and not recorded in turn. "
        "Recorded times of passes are compared with how long the passes sleep, and the length of the iteration on the "
        f"ranks' common clock with the wall clock.\n\n{markdown_table(heads, [cells(found) for found in rows])}"
    )


PART = Part("recording", "Recording", measure, claims, section)
