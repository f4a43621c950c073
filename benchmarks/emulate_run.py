#!/usr/bin/env python3
"""Runs a schedule with passes that sleep, if wanted with one stage slower than planned, and writes the timeline.

    python benchmarks/emulate_run.py --slow 2=1.5 --output timeline

The engine, its messages and its recorder are those of a training; each rank is a process, and sleeping takes no core.
What comes out is what --pipeline-measure writes: to see what a slow stage does to a schedule,
and what helps against it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.uneven_layers import uneven
from megatron.schedules.cli.ending import emit, run
from megatron.schedules.measure.clocks import aligned, gaps, latencies
from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.planner.layer_partition import partition_layers
from megatron.schedules.planner.registry import Request, placement, plan
from megatron.schedules.programs.program import Program
from megatron.schedules.report.drawing import write_run
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import MOST_PASSES, MOST_RANKS, check_size
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable

_WARM_UP = 2  # iterations before the one that is recorded
_LAYERS_A_STAGE = 4
# Of an iteration, of which several are run: ranks sleep for as long as they are asked to.
_LONGEST_MS = 10_000
_SLOWEST = 1e6  # factor of --slow; sums of much longer times overflow


# The flag of each part of a request.
FLAGS = {
    "costs": "--costs",
    "schedule": "--schedule",
    "csv": "--schedule",
    "ranks": "--pipeline-size",
    "microbatches": "--microbatches",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--schedule", metavar="NAME", default="v-half", help="Which schedule; v-half without it.")
@click.option("--pipeline-size", type=click.IntRange(2, MOST_RANKS), default=4, help="Ranks; 4 without it.")
@click.option("--microbatches", type=click.IntRange(1, MOST_PASSES), default=8, help="Of one iteration; 8 without it.")
@click.option("--costs", metavar="F,I,W", default="1,1.1,0.75", help="Times over half a rank's layers.")
@click.option("--unit-ms", type=float, default=20.0, help="Milliseconds of one unit of these; 20 without it.")
@click.option("--slow", metavar="STAGE=FACTOR", help="A stage whose layers take so many times as long as planned.")
@click.option(
    "--cure",
    type=click.Choice(["order", "layers"]),
    help="Then plan for the times that were measured, and carry that out instead: another order, as "
    "--pipeline-replan does, or other layers on each stage too, as --pipeline-layers auto does.",
)
@click.option("--output", metavar="DIR", type=Path, required=True, help="Where to write.")
def _emulate(
    schedule: str,
    pipeline_size: int,
    microbatches: int,
    costs: str,
    unit_ms: float,
    slow: str | None,
    cure: str | None,
    output: Path,
) -> None:
    """Runs one iteration of a schedule with passes that sleep, and writes its timeline."""
    check_size(pipeline_size, microbatches, None, f"--pipeline-size {pipeline_size} with --microbatches {microbatches}")
    request = Request(schedule, pipeline_size, microbatches, Costs.parse(costs))
    true = slowed(request, *_slow(slow))
    _check_length(request, true, unit_ms)
    recorded = emulated(request, true, unit_ms)
    if cure is not None:
        request = cured(request, recorded, layers=cure == "layers")
        _say("before", recorded)
        recorded = emulated(request, true, unit_ms)
    try:
        names = write_run(recorded, output)
    except OSError as error:
        raise PlanError(f"--output: cannot write {output}: {error.strerror}") from None
    _say(f"written to {output}: {', '.join(names)}", recorded)


def _check_length(request: Request, true: Costs, unit_ms: float) -> None:
    if not 0 < unit_ms < math.inf:
        raise PlanError(f"--unit-ms {unit_ms:g} must be a number above zero")
    schedule = plan(request)
    length = unit_ms * simulate(schedule, true.on(schedule.placement)).makespan
    if length > _LONGEST_MS:
        raise PlanError(
            f"--costs, --slow and --unit-ms make an iteration {length / 1e3:g} s long; "
            f"{_LONGEST_MS // 1000} s at most: give a smaller --unit-ms"
        )


def _say(what: str, recorded: Recorded) -> None:
    bubbles = [f"{100 * each.bubble:.2f} %" for each in (recorded.planned, recorded.timeline)]
    length = recorded.timeline.makespan
    said = printable(what)
    emit(f"bubble planned {bubbles[0]}, measured {bubbles[1]} of {length:.0f} ms; {said}\n", None)


def slowed(request: Request, stage: int = 0, factor: float = 1.0) -> Costs:
    """Returns the costs of ``request`` where the layers of ``stage``, divided evenly, take ``factor`` times as long."""
    stages = _stages(request)
    if not 0 <= stage < stages:
        raise PlanError(f"--slow {stage}={factor:g}: there are stages 0 to {stages - 1}")
    return _with_layers(request.costs, [factor if each == stage else 1.0 for each in range(stages)])


def cured(request: Request, recorded: Recorded, *, layers: bool) -> Request:
    """Returns ``request`` with the measured times of stages; with ``layers`` also with a layer partition for them."""
    planned, measured = (iteration_of(each).stages for each in (recorded.planned, recorded.timeline))
    times = [now / before for before, now in zip(planned, measured, strict=True)]
    usual = statistics.median(times)
    found = replace(request, costs=_with_layers(request.costs, [time / usual for time in times]))
    return partition_layers(found) if layers else found


def _with_layers(costs: Costs, times: Sequence[float]) -> Costs:
    """Returns ``costs`` where the layers of each stage take so many times as long; memory does not change."""
    return uneven(costs, [time for time in times for _ in range(_LAYERS_A_STAGE)])


def _stages(request: Request) -> int:
    where = placement(request)
    if where is None:
        raise PlanError(
            f"--schedule {request.schedule} has no stages before it is planned: name one that has", "schedule"
        )
    return where.stages


def emulated(request: Request, true: Costs, unit_ms: float) -> Recorded:
    """Returns one recorded iteration with passes that sleep.

    Args:
        request: the schedule, and the times of its passes as planned.
        true: how long they sleep, where its layers lie.
        unit_ms: of both, in milliseconds.
    """
    from benchmarks.emulated_ranks import run_ranks
    from megatron.schedules.programs.checker import proved

    schedule = plan(request)
    planned, sleeping = (costs.on(schedule.placement, request.decisions) for costs in (request.costs, true))
    times = {kind: tuple(unit_ms * time for time in each) for kind, each in sleeping.times.items()}
    measured = replace(sleeping, times=times)
    programs = proved(schedule, planned)
    found = run_ranks(request.ranks, partial(_on_a_rank, programs, measured), timeout=600)
    rows = [[[span[at] for span in rank] for rank in found] for at in (0, 1)]
    start, end, _ = aligned(schedule, *rows)
    links = dict(latencies([gaps(schedule, *rows)]))
    comm = statistics.median(links.values())
    timeline = Timeline(schedule, replace(measured, comm=comm, latencies=links), start, end)
    return Recorded(timeline, simulate(schedule, planned), 1, "passes that sleep")


def _on_a_rank(programs: Sequence[Program], costs: StageCosts) -> list[tuple[float, float]]:
    """Returns start and end of each pass of this rank, in milliseconds by its own clock."""
    from benchmarks import emulated_ours
    from benchmarks.emulated_passes import Passes
    from benchmarks.emulated_ranks import begin_together
    from megatron.schedules.runtime.recorder import HostClock, Recorder

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
        found = int(stage), float(factor)
        if not 0 < found[1] <= _SLOWEST:
            raise ValueError(text)
        return found
    except ValueError:
        raise PlanError(
            f"--slow {text!r} is no stage and how many times as long it takes, up to {_SLOWEST:g}: write it as in 2=1.5"
        ) from None


if __name__ == "__main__":
    sys.exit(run(_emulate, "emulate_run.py", flags=FLAGS))
