#!/usr/bin/env python3
"""Carries out a schedule with passes that sleep, one stage slower than planned perhaps, and writes what happened.

    python tools/emulate_run.py --slow 2=1.5 --output timeline

The engine, its messages and its recorder are those of a training; each rank is a process, and sleeping takes no core.
What comes out is what --pipeline-timeline writes: to see what a slow stage does to a schedule before there is one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.schedules.ending import emit, run
from megatron.schedules.planning.clocks import aligned, gaps, hops
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.recorded import Recorded
from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.stage_costs import StageCosts
from megatron.schedules.report.drawing import write_run
from megatron.schedules.runtime.program import Program

_WARM_UP = 2  # iterations before the one that is recorded


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--schedule", metavar="NAME", default="v-half", help="Which schedule; v-half without it.")
@click.option("--pipeline-size", type=int, default=4, help="Ranks; 4 without it.")
@click.option("--microbatches", type=int, default=8, help="Of one iteration; 8 without it.")
@click.option("--costs", metavar="F,I,W", default="1,1.1,0.75", help="Times over half a rank's layers.")
@click.option("--unit-ms", type=float, default=20.0, help="Milliseconds of one unit of these; 20 without it.")
@click.option("--slow", metavar="STAGE=FACTOR", help="A stage that takes so many times as long as planned.")
@click.option("--output", metavar="DIR", type=Path, required=True, help="Where to write.")
def _emulate(
    schedule: str, pipeline_size: int, microbatches: int, costs: str, unit_ms: float, slow: str | None, output: Path
) -> None:
    """Run one iteration of a schedule with passes that sleep, and write its timeline."""
    request = Request(schedule, pipeline_size, microbatches, Costs.parse(costs))
    recorded = emulated(request, unit_ms, *_slow(slow))
    try:
        names = write_run(recorded, output)
    except OSError as error:
        raise PlanError(f"--output: cannot write {output}: {error.strerror}") from None
    bubbles = [f"{100 * each.bubble:.2f} %" for each in (recorded.planned, recorded.timeline)]
    emit(f"bubble planned {bubbles[0]}, measured {bubbles[1]}; written to {output}: {', '.join(names)}\n", None)


def emulated(request: Request, unit_ms: float, stage: int = 0, factor: float = 1.0) -> Recorded:
    """One iteration as it went with passes that sleep for their planned times, those of ``stage`` longer.

    Args:
        request: the schedule, and the times of its passes in units.
        unit_ms: of these.
        stage, factor: which stage takes how many times as long.
    """
    from megatron.schedules.runtime.check import check
    from megatron.schedules.runtime.lowering import lower
    from tools.benchmarks.emulated_ranks import run_ranks

    schedule = plan(request)
    planned = request.costs.on(schedule.placement)
    if not 0 <= stage < schedule.placement.stages:
        raise PlanError(f"--slow {stage}={factor:g}: there are stages 0 to {schedule.placement.last_stage}")
    slow = [unit_ms * (factor if each == stage else 1.0) for each in range(schedule.placement.stages)]
    times = {kind: tuple(t * s for t, s in zip(each, slow, strict=True)) for kind, each in planned.times.items()}
    measured = replace(planned, times=times)
    programs = lower(schedule, planned)
    check(programs)
    found = run_ranks(request.ranks, partial(_on_a_rank, programs, measured), timeout=600)
    rows = [[[span[at] for span in rank] for rank in found] for at in (0, 1)]
    start, end, _ = aligned(schedule, *rows)
    latencies = dict(hops([gaps(schedule, *rows)]))
    comm = statistics.median(latencies.values())
    timeline = Timeline(schedule, replace(measured, comm=comm, hops=latencies), start, end)
    return Recorded(timeline, simulate(schedule, planned), 1, "passes that sleep")


def _on_a_rank(programs: Sequence[Program], costs: StageCosts) -> list[tuple[float, float]]:
    """Start and end of each pass of this rank, in milliseconds by its own clock."""
    from megatron.schedules.runtime.recorder import HostClock, Recorder
    from tools.benchmarks import emulated_ours
    from tools.benchmarks.emulated_passes import Passes
    from tools.benchmarks.emulated_ranks import begin_together

    seconds = {kind: tuple(time / 1e3 for time in times) for kind, times in costs.times.items()}
    passes = Passes(replace(costs, times=seconds), dict.fromkeys(Kind, 0.0))
    begin_together()
    emulated_ours.settle(programs, passes, statistics.median)
    recorder = Recorder(HostClock())
    iteration = emulated_ours.start(programs, passes, [recorder])
    for _ in range(_WARM_UP + 1):
        begin_together()
        recorder.begin()
        iteration()
        recorder.end()
    spans = [recorder.take() or [] for _ in range(_WARM_UP + 1)][-1]
    return [(span.start, span.end) for span in spans]


def _slow(text: str | None) -> tuple[int, float]:
    if text is None:
        return 0, 1.0
    stage, _, factor = text.partition("=")
    try:
        return int(stage), float(factor)
    except ValueError:
        raise PlanError(
            f"--slow {text!r} is no stage and how many times as long it takes: write it as in 2=1.5"
        ) from None


if __name__ == "__main__":
    sys.exit(run(_emulate, "emulate_run.py"))
