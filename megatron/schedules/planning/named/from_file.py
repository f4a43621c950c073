"""A user's own schedule, from a compute-only CSV."""

from __future__ import annotations

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.request import Request
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.textforms import from_csv


def from_file(request: Request) -> Schedule:
    """Read the request's CSV; it must be for just as many ranks and microbatches as asked."""
    if request.csv is None:
        raise PlanError(
            "schedule 'file' needs a CSV: give one with --schedule-file (in training --pipeline-schedule-file)", "csv"
        )
    schedule = from_csv(request.csv, name=request.schedule)
    for what, own, asked in (
        ("pipeline ranks", schedule.ranks, request.ranks),
        ("microbatches", schedule.microbatches, request.microbatches),
    ):
        if own != asked:
            raise PlanError(f"the schedule's CSV is for {own} {what}, but {asked} were asked for", "csv")
    return schedule
