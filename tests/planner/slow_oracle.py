"""A slow simulator to check the fast one against: it knows what each pass needs, and nothing of sweeps or queues."""

from __future__ import annotations

from itertools import pairwise

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.schedule import Schedule

Spans = dict[Pass, tuple[float, float]]


def slow_spans(schedule: Schedule, costs: Costs) -> Spans | None:
    """Start and end of every pass; None where passes wait for each other.

    Every pass begins at 0 and is pushed later, again and again, until none starts before what it needs. Where that has
    not settled after one round for each pass, the passes wait in a circle.
    """
    rank_of = {work: rank for rank, row in enumerate(schedule.order) for work in row}
    needs = _needs(schedule, rank_of)
    length = {work: _length(work, schedule, costs) for work in rank_of}
    for row in schedule.order:
        _hide(row, length, costs)
    start = dict.fromkeys(rank_of, 0.0)
    latency = costs.on(schedule.placement).latency
    for _ in range(len(rank_of) + 1):
        settled = True
        for work, sources in needs.items():
            for source in sources:
                wait = latency(rank_of[source], rank_of[work])
                if start[work] < start[source] + length[source] + wait:
                    start[work] = start[source] + length[source] + wait
                    settled = False
        if settled:
            return {work: (at, at + length[work]) for work, at in start.items()}
    return None


def _needs(schedule: Schedule, rank_of: dict[Pass, int]) -> dict[Pass, list[Pass]]:
    needs: dict[Pass, list[Pass]] = {work: [] for work in rank_of}
    for row in schedule.order:
        for before, after in pairwise(row):
            needs[after].append(before)
    for work in rank_of:
        stage, kind, m = work
        if kind is Kind.F:
            wanted = [Pass(stage - 1, Kind.F, m)]
        elif kind is Kind.W:
            wanted = [Pass(stage, Kind.I, m)]
        else:
            wanted = [Pass(stage, Kind.F, m), Pass(stage + 1, Kind.I, m), Pass(stage + 1, Kind.B, m)]
        needs[work] += [source for source in wanted if source in rank_of]
    return needs


def _hide(row: tuple[Pass, ...], length: dict[Pass, float], costs: Costs) -> None:
    """Takes from each W what runs behind messages of experts: of those that come next and are due, in order."""
    forward, input_grad, _ = costs.layers.passes
    again, (in_forward, in_input_grad) = costs.layers.stock_recompute, costs.layers.messages
    shares = {
        Kind.F: in_forward / forward,
        Kind.I: (in_input_grad + again * in_forward) / (input_grad + again * forward),
    }
    ends = {work.stage: work for work in row if work.kind in (Kind.W, Kind.B)}
    for place, work in enumerate(row):
        message = shares.get(work.kind, 0.0) * length[work]
        for weights in [later for later in row[place:] if later.kind in (Kind.W, Kind.B)]:
            due = weights.kind is Kind.W and Pass(weights.stage, Kind.I, weights.microbatch) in row[:place]
            if not due or weights in ends.values():
                break
            behind = min(message, length[weights])
            length[weights] -= behind
            message -= behind


def _length(work: Pass, schedule: Schedule, costs: Costs) -> float:
    forward, input_grad, weight_grad = costs.layers.passes
    again, model = costs.layers.stock_recompute * forward, costs.model
    half = {
        Kind.F: forward,
        Kind.I: again + input_grad,
        Kind.W: weight_grad,
        Kind.B: again + input_grad + weight_grad,
    }[work.kind]
    weight = 1.0 if model.divisible else model.layers[work.stage].split.forward / model.mean.forward
    return half * 2 / _stages_a_rank(schedule) * weight


def _stages_a_rank(schedule: Schedule) -> int:
    return len({work.stage for work in schedule.order[0]})


def held_at(time: float, rank: int, schedule: Schedule, costs: Costs, spans: Spans) -> float:
    """Microbatches' worth of activations ``rank`` holds just after ``time``, counted one by one."""
    held, model = 0.0, costs.model
    for work in schedule.order[rank]:
        if work.kind is not Kind.F:
            continue
        share = 1.0 if model.divisible else model.layers[work.stage].split.held / model.mean.held
        one = share / _stages_a_rank(schedule)
        ends = {kind: spans[found][1] for kind in Kind if (found := Pass(work.stage, kind, work.microbatch)) in spans}
        if Kind.B in ends:
            if spans[work][0] <= time < ends[Kind.B]:
                held += costs.memory.kept * one
            continue
        begins = spans[Pass(work.stage, Kind.I, work.microbatch)][0]
        # What I makes is there from its start; what it gives back is there until its end.
        turn = begins if costs.memory.weight_share > costs.memory.kept else ends[Kind.I]
        if spans[work][0] <= time < turn:
            held += costs.memory.kept * one
        elif turn <= time < ends[Kind.W]:
            held += costs.memory.weight_share * one
    return held
