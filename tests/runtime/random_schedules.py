"""Random valid schedules over random placements: whatever the runtime must carry out, sensible or not."""

from __future__ import annotations

import random
from dataclasses import replace

from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.planning.schedule import Schedule


def random_placement(rng: random.Random, ranks: int) -> Placement:
    """One of the known placements or any map with equally many stages on each rank."""
    chunks = rng.randint(1, 3)
    shuffled = [rank for rank in range(ranks) for _ in range(chunks)]
    rng.shuffle(shuffled)
    choices = (
        sequential(ranks),
        interleaved(ranks, chunks),
        zigzag(ranks, chunks),
        Placement("custom", tuple(shuffled)),
    )
    return rng.choice(choices)


def random_schedule(seed: int, ranks: int | None = None, microbatches: int | None = None) -> Schedule:
    """A schedule that takes ready passes at random; I and W together, apart, or as B, mixed."""
    rng = random.Random(seed)
    ranks = ranks or rng.randint(1, 4)
    placement = random_placement(rng, ranks)
    n = microbatches or rng.randint(1, 5)
    last = placement.last_stage
    split = rng.choice((0.0, 0.5, 1.0))
    kinds = {(s, m): (Kind.I, Kind.W) if rng.random() < split else (Kind.B,) for s in range(last + 1) for m in range(n)}
    rows: list[list[Pass]] = [[] for _ in range(ranks)]
    ready = [Pass(0, Kind.F, m) for m in range(n)]
    while ready:
        work = ready.pop(rng.randrange(len(ready)))
        stage, kind, m = work
        rows[placement.rank_of[stage]].append(work)
        if kind is Kind.F:
            ready.append(Pass(stage + 1, Kind.F, m) if stage < last else Pass(last, kinds[last, m][0], m))
        elif kind is not Kind.W:
            if stage:
                ready.append(Pass(stage - 1, kinds[stage - 1, m][0], m))
            if kind is Kind.I:
                weight = Pass(stage, Kind.W, m)
                if rng.random() < 0.3:
                    rows[placement.rank_of[stage]].append(weight)
                else:
                    ready.append(weight)
    return Schedule(f"random {seed}", placement, n, tuple(map(tuple, rows)))


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards alone, in the same order: an evaluation."""
    rows = tuple(tuple(work for work in row if work.kind is Kind.F) for row in schedule.order)
    return replace(schedule, order=rows)
