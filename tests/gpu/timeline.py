"""Compares measured times of passes with the simulator's, at measured costs; plain numbers, no torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.schedules.programs.program import Action
from megatron.schedules.schedule.kinds import KINDS, Kind, Share
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import StageCosts


class Span(NamedTuple):
    """Start and end of a pass on a rank, in seconds of one clock."""

    action: Action
    began: float
    ended: float


Iteration = Sequence[Sequence[Span]]
"""By rank, its passes in order."""


def against_the_simulator(schedule: Schedule, iterations: Sequence[Iteration]) -> dict[str, Any]:
    """Returns the difference of the median iteration from its simulation.

    Raises:
        ValueError: where a rank did other passes than the schedule has, or in another order.
    """
    for spans in iterations:
        _check_order(schedule, spans)
    costs = measured_costs(schedule, iterations)
    simulated = simulate(schedule, costs)
    spans = sorted(iterations, key=_length)[len(iterations) // 2]
    first = min(row[0].began for row in spans)
    pairs = [
        (span.began - first, start)
        for row, starts in zip(spans, simulated.start, strict=True)
        for span, start in zip(row, starts, strict=True)
    ]
    return {
        "iteration, ms": 1e3 * _length(spans),
        "simulated, ms": 1e3 * simulated.makespan,
        "iteration off by, %": 100 * (_length(spans) / simulated.makespan - 1),
        "starts off by, % of the iteration": 100
        * statistics.fmean(abs(measured - start) for measured, start in pairs)
        / simulated.makespan,
        "message, ms": 1e3 * costs.comm,
    }


def measured_costs(schedule: Schedule, iterations: Sequence[Iteration]) -> StageCosts:
    """Returns the median times of each stage's passes, and the least latency of a message."""
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for spans in iterations:
        for span in (span for row in spans for span in row):
            assert isinstance(span.action.op, Kind)
            took[span.action.op, span.action.stage].append(span.ended - span.began)
    median = {key: statistics.median(each) for key, each in took.items()}
    placement = schedule.placement
    times: Mapping[Kind, tuple[float, ...]] = {
        kind: tuple(_took(median, kind, stage) for stage in range(placement.stages))
        for kind, row in KINDS.items()
        if not row.parts and not row.optional
    }
    gaps = sorted(gap for spans in iterations for gap in _gaps(schedule, spans))
    return StageCosts(
        times=times,
        activation=(1 / placement.chunks,) * placement.stages,
        comm=max(0.0, gaps[len(gaps) // 10]) if gaps else 0.0,
        held=dict.fromkeys(Share, (1 / placement.chunks,) * placement.stages),
    )


def _took(median: Mapping[tuple[Kind, int], float], kind: Kind, stage: int) -> float:
    """Divides the time of a whole backward among its parts, which were not measured."""
    if (kind, stage) in median:
        return median[kind, stage]
    for whole, row in KINDS.items():
        if kind in row.parts and (whole, stage) in median:
            return median[whole, stage] / len(row.parts)
    raise ValueError(f"stage {stage} was seen to do no {kind}")


def _gaps(schedule: Schedule, spans: Iteration) -> list[float]:
    """Returns the times from the end of each forward to the start of the next stage's on another rank.

    One that came late because its rank was busy counts too; the shortest of them are the message's own time.
    """
    rank_of = schedule.placement.rank_of
    forwards = {
        (span.action.stage, span.action.microbatch): span for row in spans for span in row if span.action.op is Kind.F
    }
    return [
        span.began - forwards[stage - 1, m].ended
        for (stage, m), span in forwards.items()
        if stage and rank_of[stage - 1] != rank_of[stage]
    ]


def _check_order(schedule: Schedule, spans: Iteration) -> None:
    for rank, (row, seen) in enumerate(zip(schedule.order, spans, strict=True)):
        planned = [Action(work.kind, work.stage, work.microbatch) for work in row]
        if planned != [span.action for span in seen]:
            raise ValueError(f"rank {rank} did other passes than planned, or in another order")


def _length(spans: Iteration) -> float:
    return max(row[-1].ended for row in spans) - min(row[0].began for row in spans)
