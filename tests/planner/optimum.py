"""The shortest schedule there is, proved by a constraint solver: the mark that planned schedules are held against.

The model shares nothing with the planner but the placement: it knows passes, what each waits for, one pass at a time on
a rank, and what a rank may hold.
"""

from __future__ import annotations

from collections.abc import Collection

from ortools.sat.python import cp_model

from megatron.schedules.schedule.placement import Placement


def optimal_makespan(
    placement: Placement,
    microbatches: int,
    costs: tuple[int, int, int, int],
    limit: float,
    seconds: float,
    *,
    recomputed: Collection[int] = (),
    offloaded: Collection[int] = (),
    copy: int = 0,
) -> int:
    """The least makespan at whole-numbered ``costs`` (F, I, W, latency) within ``limit`` microbatches on every rank.

    A stage in ``recomputed`` holds nothing from F until its recompute pass. One in ``offloaded`` holds nothing between
    its two copies, each of ``copy`` over half a rank's layers, one at a time each way. Between two passes of the rank,
    memory is freed after the first copy and allocated before the second.
    """
    model, chunks = cp_model.CpModel(), placement.chunks
    # Passes over half a rank's layers, as costs are given, times what a stage has of them.
    lengths = {kind: cost * 2 // chunks for kind, cost in zip("FIW", costs, strict=False)}
    latency, horizon = costs[3], 2 * microbatches * (sum(costs[:3]) + costs[3]) * placement.stages
    makespan = model.new_int_var(0, horizon, "makespan")
    # In small letters the moments between passes.
    lengths |= {"R": lengths["F"], "O": copy * 2 // chunks, "L": copy * 2 // chunks, "o": 0, "l": 0}
    start = {
        (stage, kind, m): model.new_int_var(0, horizon, f"{stage}{kind}{m}")
        for stage in range(placement.stages)
        for kind in "FIW" + "R" * (stage in recomputed) + "OolL" * (stage in offloaded)
        for m in range(microbatches)
    }

    def wait(later: tuple[int, str, int], earlier: tuple[int, str, int]) -> None:
        apart = placement.rank_of[later[0]] != placement.rank_of[earlier[0]]
        model.add(start[later] >= start[earlier] + lengths[earlier[1]] + (latency if apart else 0))

    for stage, kind, m in start:
        if kind == "F" and stage:
            wait((stage, kind, m), (stage - 1, "F", m))
        if kind == "I":
            for before in "F" + "R" * (stage in recomputed) + "L" * (stage in offloaded):
                wait((stage, kind, m), (stage, before, m))
            if stage < placement.last_stage:
                wait((stage, kind, m), (stage + 1, "I", m))
        if kind in "ROolL":
            wait((stage, kind, m), (stage, {"o": "O", "l": "o", "L": "l"}.get(kind, "F"), m))
        if kind == "W":
            wait((stage, kind, m), (stage, "I", m))
            model.add(makespan >= start[stage, kind, m] + lengths[kind])
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        here = [key for key in start if key[0] in stages]
        for alone in ("FIWRol", "O", "L"):
            model.add_no_overlap(
                model.new_fixed_size_interval_var(start[key], lengths[key[1]], f"run {key}")
                for key in here
                if key[1] in alone
            )
        held = []
        for stage in stages:
            whole = [("R" if stage in recomputed else "F", "W")]
            for first, last in [("F", "o"), ("l", "W")] if stage in offloaded else whole:
                for m in range(microbatches):
                    end = start[stage, last, m] + lengths[last]
                    span = model.new_int_var(0, horizon, f"span {stage} {first} {m}")
                    held.append(model.new_interval_var(start[stage, first, m], span, end, f"hold {stage} {first} {m}"))
        model.add_cumulative(held, [1] * len(held), int(limit * chunks))
    # Microbatches are alike: sorting the starts of each stage's passes of a kind breaks no rule.
    for stage, kind, m in start:
        if m + 1 < microbatches:
            model.add(start[stage, kind, m + 1] >= start[stage, kind, m] + lengths[kind])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"not solved in {seconds} s: {solver.status_name(status)}"
    return round(solver.objective_value)
