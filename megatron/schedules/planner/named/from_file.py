"""A user's own schedule, from a compute-only CSV."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError


def from_file(request: Request) -> Schedule:
    """Read the request's CSV; it must be for just as many ranks and microbatches as asked."""
    if request.csv is None:
        raise PlanError("schedule 'file' needs a CSV: name it in place of the schedule, such as mine.csv", "csv")
    schedule = from_csv(request.csv, name=request.schedule)
    for what, own, asked in (
        ("pipeline ranks", schedule.ranks, request.ranks),
        ("microbatches", schedule.microbatches, request.microbatches),
    ):
        if own != asked:
            raise PlanError(f"the schedule's CSV is for {own} {what}, but {asked} were asked for", "csv")
    return schedule


def with_memory_saving(request: Request) -> Request:
    """``request`` with what its CSV says of recompute and offload, where its decisions say nothing of it.

    A stage with an R has all of its layers recomputed, one with an O all of them offloaded. Where it has both, the
    first half is offloaded and the rest recomputed, in whole layers where their number is known.

    Raises:
        PlanError: as :func:`from_file` does.
    """
    text, decided = request.csv or "", request.decisions
    if decided.recomputed or decided.offloaded or (Kind.R not in text and Kind.O not in text):
        return request
    schedule = from_file(request)
    counts = request.layers_on(schedule.placement)
    has = {(work.stage, work.kind) for _, work in schedule.passes()}
    recomputed, offloaded = [], []
    for stage in range(schedule.placement.stages):
        has_r, has_o = (stage, Kind.R) in has, (stage, Kind.O) in has
        parts = counts[stage] if counts else 2
        half = (parts + 1) // 2 / max(1, parts)
        offloaded.append(has_o * (half if has_r else 1.0))
        recomputed.append(has_r * (1.0 - offloaded[-1]))
    return replace(request, decisions=decided.saving(recomputed, offloaded))
