"""Validation: whether an order is a schedule at all, told apart from how it was made."""

from __future__ import annotations

from collections import Counter

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.passes import Kind, Pass
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.simulate import sweep


def validate(schedule: Schedule) -> None:
    """Check that every rank does its own passes exactly once and that the order can finish.

    Raises:
        PlanError: naming the first pass that is missing, doubled, misplaced, or part of a deadlock.
    """
    _validate_ranks(schedule)
    _validate_passes(schedule)
    _validate_local_order(schedule)
    sweep(schedule)


def _validate_ranks(schedule: Schedule) -> None:
    if schedule.microbatches < 1:
        raise PlanError(f"{schedule.name}: {schedule.microbatches} microbatches; at least 1 is needed")
    if len(schedule.order) != schedule.ranks:
        raise PlanError(f"{schedule.name}: {len(schedule.order)} rows for {schedule.ranks} ranks")
    rank_of = schedule.placement.rank_of
    for rank, work in schedule.passes():
        if not 0 <= work.stage < len(rank_of):
            raise PlanError(f"{schedule.name}: {work} on rank {rank}: there are only {len(rank_of)} stages")
        if rank_of[work.stage] != rank:
            raise PlanError(
                f"{schedule.name}: {work} on rank {rank}: stage {work.stage} is on rank {rank_of[work.stage]}"
            )
        if not 0 <= work.microbatch < schedule.microbatches:
            raise PlanError(
                f"{schedule.name}: {work} on rank {rank}: there are only {schedule.microbatches} microbatches"
            )


def _validate_passes(schedule: Schedule) -> None:
    count = Counter(work for _, work in schedule.passes())
    doubled = next((work for work, times in count.items() if times > 1), None)
    if doubled is not None:
        raise PlanError(f"{schedule.name}: {doubled} stands {count[doubled]} times; every pass is done once")
    for stage in range(schedule.placement.stages):
        for m in range(schedule.microbatches):
            if Pass(stage, Kind.F, m) not in count:
                raise PlanError(f"{schedule.name}: {stage}F{m} is missing")
            whole, first, second = (Pass(stage, kind, m) in count for kind in (Kind.B, Kind.I, Kind.W))
            if whole and (first or second):
                raise PlanError(
                    f"{schedule.name}: stage {stage}, microbatch {m} has a whole backward B and an I or W too"
                )
            if not whole and not (first and second):
                lacking = (
                    f"{stage}W{m}"
                    if first
                    else f"{stage}I{m}"
                    if second
                    else f"{stage}B{m} (or {stage}I{m} and {stage}W{m})"
                )
                raise PlanError(f"{schedule.name}: {lacking} is missing")


def _validate_local_order(schedule: Schedule) -> None:
    for row in schedule.order:
        seen: set[Pass] = set()
        for work in row:
            stage, kind, m = work
            before = Pass(stage, Kind.I if kind is Kind.W else Kind.F, m)
            if kind is not Kind.F and before not in seen:
                raise PlanError(f"{schedule.name}: {work} stands before {before}, which it needs")
            seen.add(work)
