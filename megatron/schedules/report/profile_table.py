"""A job's own measurements in about ten lines, for any number of stages."""

from __future__ import annotations

import statistics

from megatron.schedules.measure.job_profile import JobProfile, Measured
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.schedule.kinds import KINDS, PARTS, Kind, Share
from megatron.schedules.utils.printable import percent

_HEADINGS = ("ms", "median stage", "quickest", "slowest", "spread at most")


def as_text(profile: JobProfile, recorded: Recorded) -> str:
    """Returns a table of the kinds of passes, then latencies, bytes and the bubble, as log lines.

    The spread is the 90th less the 10th percentile of a stage's passes, over their median.
    """
    first, last = profile.iterations
    replicas = f", {profile.replicas} ranks for each stage" if profile.replicas > 1 else ""
    rows = [
        _HEADINGS,
        *(_row(profile, kind) for kind in KINDS if _by_stage(profile, kind) and not _assumed(profile, kind)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    head = f"{profile.schedule} in iterations {first}-{last}{replicas}"
    said = [head, *lines, _others(profile), _bubbles(recorded)]
    return "\n".join(f"pipeline schedule: measured: {line}" for line in said)


def _by_stage(profile: JobProfile, kind: Kind) -> dict[int, Measured]:
    return {at: stage.times[kind] for at, stage in enumerate(profile.stages) if kind in stage.times}


def _assumed(profile: JobProfile, kind: Kind) -> bool:
    """Checks if ``kind`` is part of a backward that no stage split."""
    return kind in PARTS and all(stage.halved for stage in profile.stages)


def _row(profile: JobProfile, kind: Kind) -> tuple[str, ...]:
    stages = _by_stage(profile, kind)
    quickest, slowest = (pick(stages, key=lambda stage: stages[stage].median) for pick in (min, max))
    spread = max(((times.high - times.low) / times.median for times in stages.values() if times.median), default=0.0)
    return (
        f"{kind} ({KINDS[kind].meaning})",
        f"{statistics.median(times.median for times in stages.values()):.3g}",
        *(f"{stages[stage].median:.3g} (stage {stage})" for stage in (quickest, slowest)),
        percent(spread, 0),
    )


def _others(profile: JobProfile) -> str:
    said = []
    if profile.latencies:
        source, to, worst = max(profile.latencies, key=lambda latency: latency[2])
        said.append(f"a message takes {profile.comm:.3g} ms, {worst:.3g} from rank {source} to {to}")
    waits = [[stage.messages.get(kind, 0.0) for stage in profile.stages] for kind in (Kind.F, Kind.I)]
    if any(map(any, waits)):
        forward, input_grad = map(statistics.median, waits)
        said.append(
            f"with nothing behind messages of experts F waits {forward:.3g} ms for them and I {input_grad:.3g} on the "
            "median stage"
        )
        if profile.exposed is not None:
            said.append(f"weight gradients behind them leave {percent(profile.exposed, 0)} of that exposed")
    held = [stage.held / 2**20 for stage in profile.stages]
    if any(held):
        waiting = sum(stage.sizes[Share.WEIGHTS] for stage in profile.stages) / sum(
            stage.held for stage in profile.stages
        )
        said.append(
            f"a microbatch holds {statistics.median(held):.3g} MiB on the median stage, {max(held):.3g} on stage "
            f"{held.index(max(held))}; {percent(waiting, 0)} of it waits for W"
        )
    if profile.copy_gbps is not None:
        said.append(f"copies run at {profile.copy_gbps.to_host:.3g} GB/s out, {profile.copy_gbps.from_host:.3g} back")
    return "; ".join(said)


def _bubbles(recorded: Recorded) -> str:
    planned, measured = recorded.planned.bubble, recorded.timeline
    return (
        f"iteration {recorded.iteration}: {measured.makespan:.4g} ms from first to last pass, bubble "
        f"{percent(measured.bubble, 1)}, planned {percent(planned, 1)}"
    )
