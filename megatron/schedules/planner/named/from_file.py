"""Schedules from a user's compute-only CSV."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError


def from_file(request: Request) -> Schedule:
    """Reads the request's CSV; its numbers of ranks and microbatches must match the request."""
    if request.csv is None:
        raise PlanError("schedule 'file' needs a CSV: name it in place of the schedule, such as mine.csv", "csv")
    schedule = from_csv(request.csv, name=request.csv_name)
    for what, own, asked in (
        ("pipeline ranks", schedule.ranks, request.ranks),
        ("microbatches", schedule.microbatches, request.microbatches),
    ):
        if own != asked:
            raise PlanError(f"the schedule's CSV is for {own} {what}, but {asked} were asked for", "csv")
    return schedule


def with_memory_saving(request: Request) -> Request:
    """Returns ``request`` with recompute and offload as in its CSV, unless its decisions contain them.

    A stage with an R recomputes all of its layers. A stage with an O offloads all of them. A stage with both offloads
    the first half and recomputes the rest, in whole layers if their number is known.

    Raises:
        PlanError: see :func:`from_file`.
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
