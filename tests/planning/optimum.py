"""The shortest schedule there is, proved by a constraint solver: the mark that planned schedules are held against.

The model shares nothing with the planner but the placement: it knows passes, what each waits for, one pass at a time on
a rank, and what a rank may hold.
"""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from megatron.schedules.planning.placement import Placement


def optimal_makespan(
    placement: Placement, microbatches: int, costs: tuple[int, int, int, int], limit: float, seconds: float
) -> int:
    """The least makespan at whole-numbered ``costs`` (F, I, W, latency) within ``limit`` microbatches on every rank."""
    model, chunks = cp_model.CpModel(), placement.chunks
    # Passes over half a rank's layers, as costs are given, times what a stage has of them.
    lengths = {kind: cost * 2 // chunks for kind, cost in zip("FIW", costs, strict=False)}
    hop, horizon = costs[3], 2 * microbatches * (sum(costs[:3]) + costs[3]) * placement.stages
    makespan = model.new_int_var(0, horizon, "makespan")
    start = {
        (stage, kind, m): model.new_int_var(0, horizon, f"{stage}{kind}{m}")
        for stage in range(placement.stages)
        for kind in lengths
        for m in range(microbatches)
    }

    def wait(later: tuple[int, str, int], earlier: tuple[int, str, int]) -> None:
        apart = placement.rank_of[later[0]] != placement.rank_of[earlier[0]]
        model.add(start[later] >= start[earlier] + lengths[earlier[1]] + (hop if apart else 0))

    for stage, kind, m in start:
        if kind == "F" and stage:
            wait((stage, kind, m), (stage - 1, "F", m))
        if kind == "I":
            wait((stage, kind, m), (stage, "F", m))
            if stage < placement.last_stage:
                wait((stage, kind, m), (stage + 1, "I", m))
        if kind == "W":
            wait((stage, kind, m), (stage, "I", m))
            model.add(makespan >= start[stage, kind, m] + lengths[kind])
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        here = [key for key in start if key[0] in stages]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[key], lengths[key[1]], f"run {key}") for key in here]
        )
        held = []
        for stage in stages:
            for m in range(microbatches):
                end = start[stage, "W", m] + lengths["W"]
                span = model.new_int_var(0, horizon, f"span {stage} {m}")
                held.append(model.new_interval_var(start[stage, "F", m], span, end, f"hold {stage} {m}"))
        model.add_cumulative(held, [1] * len(held), int(limit * chunks))
    # Microbatches are alike: sorting the starts of each stage's passes of a kind breaks no rule.
    for stage in range(placement.stages):
        for kind in lengths:
            for m, later in pairwise(range(microbatches)):
                model.add(start[stage, kind, later] >= start[stage, kind, m] + lengths[kind])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"not solved in {seconds} s: {solver.status_name(status)}"
    return round(solver.objective_value)
