"""Validation of schedules, independent of how they were made."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from megatron.schedules.schedule.kinds import KINDS, OF_RANKS, PARTS, SPLIT, WHOLES, Kind, Pass, sources, stages_doing
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import sweep
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted


def validate(schedule: Schedule) -> None:
    """Checks that every rank runs its own passes exactly once and that the order does not deadlock.

    Raises:
        PlanError: names the first pass that is missing, duplicate, misplaced or part of a deadlock.
    """
    _validate_ranks(schedule)
    _validate_passes(schedule)
    _validate_shared(schedule)
    _validate_local_order(schedule)
    sweep(schedule)


def _validate_ranks(schedule: Schedule) -> None:
    if schedule.microbatches < 1:
        raise PlanError(f"{schedule.name}: {schedule.microbatches} microbatches; at least 1 is needed")
    if len(schedule.order) != schedule.ranks:
        raise PlanError(f"{schedule.name}: {len(schedule.order)} rows for {counted(schedule.ranks, 'rank')}")
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
                f"{schedule.name}: {work} on rank {rank}: there are only {counted(schedule.microbatches, 'microbatch')}"
            )


def _validate_passes(schedule: Schedule) -> None:
    """Checks that every kind runs once for every stage and microbatch, alone or in a combined pass."""
    there = set(chain.from_iterable(schedule.order))
    if len(there) < sum(map(len, schedule.order)):
        count = Counter(chain.from_iterable(schedule.order))
        doubled = next(work for work, times in count.items() if times > 1)
        raise PlanError(f"{schedule.name}: {doubled} stands {count[doubled]} times; every pass is done once")
    returns = {kind: back for kind in schedule.kinds if (back := KINDS[kind].returns) is not None}
    for stage, kind, m in chain.from_iterable(schedule.order if returns else ()):
        back = returns.get(kind)
        if back is not None and (stage, back, m) not in there:
            raise PlanError(f"{schedule.name}: {stage}{back}{m} is missing: {stage}{kind}{m} is of no use without it")
    alone = [kind for kind in SPLIT if kind not in PARTS]
    for stage in range(schedule.placement.stages):
        for m in range(schedule.microbatches):
            for kind in alone:
                if (stage, kind, m) not in there:
                    raise PlanError(f"{schedule.name}: {stage}{kind}{m} is missing")
            for parts, whole in WHOLES.items():
                lacking = [part for part in parts if (stage, part, m) not in there]
                if (stage, whole, m) in there:
                    if len(lacking) < len(parts):
                        raise PlanError(
                            f"{schedule.name}: stage {stage}, microbatch {m} has a whole backward {whole} and an "
                            f"{' or '.join(parts)} too"
                        )
                elif len(lacking) == len(parts):
                    instead = " and ".join(f"{stage}{part}{m}" for part in parts)
                    raise PlanError(f"{schedule.name}: {stage}{whole}{m} (or {instead}) is missing")
                elif lacking:
                    raise PlanError(f"{schedule.name}: {stage}{lacking[0]}{m} is missing")


def _validate_shared(schedule: Schedule) -> None:
    """Checks that all ranks run S and T for every microbatch, or none does, and that they are on last stages."""
    if not schedule.kinds.intersection(OF_RANKS):
        return
    there = {work for _, work in schedule.passes() if work.kind in OF_RANKS}
    for kind in OF_RANKS:
        for stage in stages_doing(kind, schedule.placement):
            for m in range(schedule.microbatches):
                if Pass(stage, kind, m) not in there:
                    every = f"every rank does {' and '.join(OF_RANKS)} of every microbatch, or none does"
                    raise PlanError(f"{schedule.name}: {stage}{kind}{m} is missing; {every}")
                there.remove(Pass(stage, kind, m))
    if there:
        work = min(there)
        raise PlanError(
            f"{schedule.name}: {work}: {work.kind} is of a rank, and is written with the last of its stages"
        )


def _validate_local_order(schedule: Schedule) -> None:
    """Checks that dependencies on the same stage come first."""
    where = schedule.placement
    needs = {
        (stage, kind): [kinds for source, kinds in sources(kind, stage, where, schedule.kinds) if source == stage]
        for kind in schedule.kinds
        for stage in range(where.stages)
    }
    for row in schedule.order:
        here, seen = set(row), set[tuple[int, Kind, int]]()
        for work in row:
            stage, kind, m = work
            for kinds in needs[stage, kind]:
                passes = [(stage, needed, m) for needed in kinds]
                if seen.isdisjoint(passes) and not (KINDS[kinds[0]].optional and here.isdisjoint(passes)):
                    raise PlanError(f"{schedule.name}: {work} stands before {Pass(*passes[0])}, which it needs")
            seen.add(work)
