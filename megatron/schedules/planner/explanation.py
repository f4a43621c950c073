"""What a plan is and how it compares with schedules by name, in a few lines for people."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planner.registry import named_within, plan
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline, simulate


def explanation(timeline: Timeline, request: Request, asked: Request) -> str:
    """What was chosen, the memory and the time that it takes, and those of 1F1B and of the best schedule by name.

    Args:
        timeline: the plan.
        request: what it answers, its decisions settled.
        asked: the same before anything was searched: schedules by name are planned for its layers.
    """
    limit = request.memory_limit
    lines = [f"Schedule: {_chosen(timeline, request)}."]
    used = f"{_percent(timeline.limit / request.ranks)} of 1F1B's"
    lines.append(f"Activation memory: {used}{'' if limit is None else f', within the limit of {_percent(limit)}'}.")
    plain = replace(asked, schedule="1f1b", partition=False, recompute=False, offload=False)
    base = plan(plain)
    of_1f1b = simulate(base, plain.costs_on(base.placement))
    compared = _compared(timeline, of_1f1b)
    lines.append(f"Bubble: {_percent(timeline.bubble)}; the iteration is {compared} 1F1B's.")
    if limit is not None:
        rivals = named_within(replace(plain, memory_limit=limit))
        best = min(rivals, key=lambda line: line.makespan, default=None)
        if best is None:
            lines.append("No schedule by name fits within the limit.")
        else:
            bubble = _percent(best.bubble)
            lines.append(
                f"The shortest schedule by name within the limit is {best.schedule.name}, with a bubble of {bubble}; "
                f"this one is {_compared(timeline, best)} it."
            )
    return "\n".join(lines)


def _chosen(timeline: Timeline, request: Request) -> str:
    placement, decisions = timeline.schedule.placement, request.decisions
    said = [f"{timeline.schedule.name} with {placement.chunks} chunk{'s' * (placement.chunks > 1)} a rank"]
    if decisions.layers is not None:
        said.append(f"layers by stage {','.join(map(str, decisions.layers))}")
    said += [f"{_percent(share)} of the layers {name}" for name, share in decisions.mean_savings.items()]
    return ", ".join(said)


def _compared(timeline: Timeline, other: Timeline) -> str:
    change = timeline.makespan / other.makespan - 1
    if abs(change) < 5e-4:
        return "as long as"
    return f"{_percent(abs(change))} {'shorter' if change < 0 else 'longer'} than"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
