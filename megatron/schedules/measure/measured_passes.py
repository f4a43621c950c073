"""Turns the measurements of all ranks into the profile of the job."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import astuple

from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.profile_facts import CopyRates, Facts
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import (
    COMPUTING,
    KINDS,
    SEEN_BY,
    TO_HOST,
    Kind,
    Pass,
    Resource,
    Share,
    StageKind,
    using,
)
from megatron.schedules.schedule.model_loads import even
from megatron.schedules.schedule.schedule import Schedule

Timed = tuple[Pass, float, float]
"""A pass or a copy, its start and its end in milliseconds."""
Change = tuple[Pass, float]
"""A pass, and the bytes allocated more after it."""


@dataclass(frozen=True)
class RankMeasured:
    """Measurements of one rank over several iterations.

    Args:
        rank: rank in its pipeline.
        times: times by stage and kind, milliseconds; O and L are the copies.
        bytes: median change of memory of a pass, by stage and kind.
        held: bytes from F to I by stage, including those that R allocates.
        latencies: latencies of its pipeline, (from, to) -> milliseconds.
        messages: median time in which a pass waits for messages of experts if nothing runs behind them, by stage and
            kind.
        exposed: time in which it waited for them in an iteration with weight gradients behind them, milliseconds; None
            without such an iteration.
    """

    rank: int
    times: Mapping[StageKind, Measured]
    bytes: Mapping[StageKind, float]
    held: Mapping[int, float]
    latencies: Mapping[tuple[int, int], float]
    messages: Mapping[StageKind, float] = field(default_factory=dict)
    exposed: float | None = None


def rank_measured(
    rank: int,
    passes: Iterable[Timed],
    copies: Iterable[Timed],
    changes: Sequence[Change],
    latencies: Mapping[tuple[int, int], float],
    waits: Iterable[tuple[Pass, float]] = (),
    exposed: float | None = None,
) -> RankMeasured:
    """Summarizes the timed ``passes`` and ``copies`` of ``rank``, and its ``changes`` of memory.

    Args:
        rank: rank in its pipeline.
        passes, copies: timed with nothing behind messages of experts.
        changes, latencies, exposed: as in :class:`RankMeasured`.
        waits: time that ``passes`` waited for these messages, milliseconds.
    """
    took: dict[StageKind, list[float]] = defaultdict(list)
    computing = (timed for timed in passes if timed[0].kind in COMPUTING)
    for (stage, kind, _), start, end in (*computing, *copies):
        took[stage, kind].append(end - start)
    changed: dict[StageKind, list[float]] = defaultdict(list)
    recomputed = {(work.stage, work.microbatch): change for work, change in changes if KINDS[work.kind].spares}
    held: dict[int, list[float]] = defaultdict(list)
    for (stage, kind, m), change in changes:
        changed[stage, kind].append(change)
        if kind is Kind.F:
            held[stage].append(change + recomputed.get((stage, m), 0.0))
    waited: dict[StageKind, list[float]] = defaultdict(list)
    for (stage, kind, _), time in waits:
        waited[stage, kind].append(time)
    return RankMeasured(
        rank,
        {key: Measured.of(times) for key, times in took.items()},
        {key: statistics.median(sizes) for key, sizes in changed.items()},
        {stage: statistics.median(sizes) for stage, sizes in held.items()},
        dict(latencies),
        {key: statistics.median(times) for key, times in waited.items()},
        exposed,
    )


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement.

    Args:
        facts: the model and the device.
        schedule: the schedule that ran.
        costs, decisions: costs and decisions of its plan.
        iterations: the first and the last timed iteration.
    """

    facts: Facts
    schedule: Schedule
    costs: Costs
    decisions: Decisions
    iterations: tuple[int, int]


def profile_of(ranks: Sequence[RankMeasured], under: Conditions) -> JobProfile:
    """Builds the profile of a job from the measurements of all its ranks, in any order.

    A stage has the times of its slowest replica, for which all others wait, and the memory of the replica with the
    most. A latency is that of the slowest pipeline. A backward that was never split is divided into I and W as in the
    plan's costs.
    """
    placement = under.schedule.placement
    replicas: dict[int, list[RankMeasured]] = defaultdict(list)
    for row in ranks:
        replicas[row.rank].append(row)
    layers = under.costs.layers_on(placement, under.decisions)
    # A model whose layers are known only by number is split evenly.
    layers = layers or even(under.facts.layers, placement.stages)
    planned = under.costs.on(placement, under.decisions).durations
    recomputed = under.decisions.recomputed
    stages = []
    for stage, rank in enumerate(placement.rank_of):
        rows = replicas[rank]
        times = {
            kind: _slowest(rows, (stage, kind)) for kind in KINDS if any((stage, kind) in row.times for row in rows)
        }
        halved = not {Kind.I, Kind.W} <= times.keys()
        if halved:
            times |= _halves(times[Kind.B], planned[Kind.I][stage], planned[Kind.W][stage])
        held = max((row.held.get(stage, 0.0) for row in rows), default=0.0)
        stages.append(
            StageProfile(
                layers[stage],
                times,
                halved,
                held=max(0.0, held),
                sizes={share: _most(rows, (stage, kind), sign) for share, (kind, sign) in SEEN_BY.items()},
                recomputed=0.0 if Kind.R not in times else 1.0 if recomputed is None else recomputed[stage],
                messages=_messages(rows, stage),
            )
        )
    latencies = {
        pair: max(row.latencies[pair] for row in ranks if pair in row.latencies)
        for pair in sorted({pair for row in ranks for pair in row.latencies})
    }
    return JobProfile(
        under.facts,
        under.schedule.name,
        placement,
        under.schedule.microbatches,
        under.iterations,
        max(len(rows) for rows in replicas.values()),
        tuple(_with_left(stages, under.costs.memory.weight_share)),
        tuple((source, to, time) for (source, to), time in latencies.items()),
        _rates(stages),
        _exposed(ranks, under.schedule),
    )


def _messages(rows: Sequence[RankMeasured], stage: int) -> dict[Kind, float]:
    """Time of messages in F, and in I or B, on the slowest replica; empty without messages."""
    times = {
        kind: max((row.messages.get((stage, member), 0.0) for row in rows for member in kinds), default=0.0)
        for kind, kinds in ((Kind.F, (Kind.F,)), (Kind.I, (Kind.I, Kind.B)))
    }
    return times if any(times.values()) else {}


def _exposed(ranks: Sequence[RankMeasured], schedule: Schedule) -> float | None:
    """Part of all messages' time that is exposed with weight gradients behind them; None if not measured."""
    seen = [row for row in ranks if row.exposed is not None]
    passes = (row.messages.get((work.stage, work.kind), 0.0) for row in seen for work in schedule.order[row.rank])
    whole = sum(passes)
    return min(1.0, sum(row.exposed or 0.0 for row in seen) / whole) if whole else None


def _with_left(stages: Sequence[StageProfile], planned: float) -> list[StageProfile]:
    """Sets the bytes kept for W in stages that never split: those of the other stages, or ``planned``."""
    seen = [stage for stage in stages if not stage.halved and stage.held]
    share = sum(stage.sizes[Share.WEIGHTS] for stage in seen) / sum(stage.held for stage in seen) if seen else planned
    return [
        replace(stage, sizes={**stage.sizes, Share.WEIGHTS: share * stage.held}) if stage.halved else stage
        for stage in stages
    ]


def _slowest(rows: Sequence[RankMeasured], key: StageKind) -> Measured:
    measured = [row.times[key] for row in rows if key in row.times]
    return Measured(
        max(times.median for times in measured),
        min(times.low for times in measured),
        max(times.high for times in measured),
    )


def _halves(whole: Measured, input_grad: float, weight_grad: float) -> dict[Kind, Measured]:
    part = input_grad / (input_grad + weight_grad)
    shares = {Kind.I: part, Kind.W: 1 - part}
    return {kind: Measured(*(share * time for time in astuple(whole))) for kind, share in shares.items()}


def _most(rows: Sequence[RankMeasured], key: StageKind, sign: int) -> float:
    """Bytes that a pass allocates (sign 1) or frees (-1) on the rank of ``rows`` with the most; 0 if not measured."""
    return max((sign * row.bytes.get(key, 0.0) for row in rows), default=0.0) + 0.0


def _rates(stages: Sequence[StageProfile]) -> CopyRates | None:
    """Speed of copies, from all bytes copied and their time."""
    ways = (Resource.TO_HOST, Resource.FROM_HOST)
    copied = [stage for stage in stages if min(_moved(stage), *(_time(stage, way) for way in ways)) > 0]
    if not copied:
        return None
    moved = sum(map(_moved, copied))
    out, back = (moved / (1e6 * sum(_time(stage, way) for stage in copied)) for way in ways)
    return CopyRates(out, back, min(out, back))


def _moved(stage: StageProfile) -> float:
    return sum(stage.sizes[share] for share in TO_HOST)


def _time(stage: StageProfile, way: Resource) -> float:
    return sum(stage.median(kind) for kind in using(way))
