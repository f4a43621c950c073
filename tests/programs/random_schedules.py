"""Random valid schedules over random placements: whatever the runtime must carry out, sensible or not.

And plans by name for a model whose vocabulary all ranks share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import KINDS, Kind, Pass, stages_doing
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule


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


def random_schedule(
    seed: int,
    ranks: int | None = None,
    microbatches: int | None = None,
    *,
    shared: bool = False,
    recompute: bool = False,
) -> Schedule:
    """A schedule that takes ready passes at random; I and W together, apart, or as B, mixed.

    ``shared`` adds S and T, those of an output layer that all ranks share, ``again`` an R here and there.
    """
    rng = random.Random(seed)
    ranks = ranks or rng.randint(1, 4)
    placement = random_placement(rng, ranks)
    n = microbatches or rng.randint(1, 5)
    last = placement.last_stage
    split = rng.choice((0.0, 0.5, 1.0))
    kinds = {(s, m): (Kind.I, Kind.W) if rng.random() < split else (Kind.B,) for s in range(last + 1) for m in range(n)}
    rows: list[list[Pass]] = [[] for _ in range(ranks)]
    ready = [Pass(0, Kind.F, m) for m in range(n)]
    parts = stages_doing(Kind.S, placement) if shared else []
    missing = dict.fromkeys(range(n), len(parts))
    while ready:
        work = ready.pop(rng.randrange(len(ready)))
        stage, kind, m = work
        rows[placement.rank_of[stage]].append(work)
        if kind is Kind.F:
            if stage < last:
                ready.append(Pass(stage + 1, Kind.F, m))
            elif parts:
                ready += [Pass(each, Kind.S, m) for each in parts]
            else:
                ready.append(Pass(last, kinds[last, m][0], m))
        elif kind is Kind.S:
            missing[m] -= 1
            if not missing[m]:
                ready.append(Pass(last, kinds[last, m][0], m))
        elif not KINDS[kind].filler:
            if stage == last:
                ready += [Pass(each, Kind.T, m) for each in parts]
            if stage:
                ready.append(Pass(stage - 1, kinds[stage - 1, m][0], m))
            if kind is Kind.I:
                weight = Pass(stage, Kind.W, m)
                if rng.random() < 0.3:
                    rows[placement.rank_of[stage]].append(weight)
                else:
                    ready.append(weight)
    if recompute:
        rows = [with_recompute(row, rng.choice((0.0, 0.5, 1.0)), rng) for row in rows]
    return Schedule(f"random {seed}", placement, n, tuple(map(tuple, rows)))


def with_recompute(row: Sequence[Pass], share: float, rng: random.Random) -> list[Pass]:
    """A rank's passes, and somewhere between F and I or B of a ``share`` of them an R."""
    found = list(row)
    for stage, kind, m in row:
        if kind in (Kind.I, Kind.B) and rng.random() < share:
            first, last = found.index(Pass(stage, Kind.F, m)), found.index(Pass(stage, kind, m))
            found.insert(rng.randint(first + 1, last), Pass(stage, Kind.R, m))
    return found


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards alone, and what is shared of them, in the same order: an evaluation."""
    rows = tuple(tuple(work for work in row if work.kind in (Kind.F, Kind.S)) for row in schedule.order)
    return replace(schedule, order=rows)


def shared_costs(layers: int) -> Costs:
    """As measured on GPUs, with an output layer that takes as long as one and a half of so many decoder layers."""
    part = Part(split=Load(1.0, 1.1, 0.75, 1.0))
    last = Part(whole=Load(1.5, 1.6, 1.1, 0.5))
    model = ModelLoads(Part(), (part,) * layers, last, kept_for_output=(0.1, 0.5), shared_vocabulary=True)
    return Costs(LayerTimes(1, 1.1, 0.75), model, Link(0.05))


def shared_request(name: str, ranks: int, microbatches: int) -> Request:
    """For a plan by name, or one that is searched for shortly, in which all ranks share the vocabulary."""
    limit = 0.9 if name == "adaptive" else None
    return Request(name, ranks, microbatches, shared_costs(4 * ranks), memory_limit=limit, search_seconds=0.02)


def shared_plan(name: str, ranks: int, microbatches: int) -> Schedule:
    """That plan."""
    return plan(shared_request(name, ranks, microbatches))
