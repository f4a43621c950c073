"""What a plan is and how it compares with schedules by name, in a few lines for people."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.planner.registry import named_within
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.search.list_scheduling import EPSILON


def explanation(timeline: Timeline, request: Request, asked: Request) -> str:
    """What was chosen, the memory and the time that it takes, and those of 1F1B and of the best schedule by name.

    Args:
        timeline: the plan.
        request: what it answers, its decisions settled.
        asked: the same before anything was searched: schedules by name are planned for its layers.
    """
    limit, ranks = request.memory_limit, request.ranks
    named = named_within(replace(asked, memory_limit=None))
    base = next((line for line in named if line.schedule.name == "1f1b"), None)
    said = "" if base is None else f"; the iteration is {_compared(timeline, base)} 1F1B's"
    used = f"{_percent(timeline.limit / ranks)} of 1F1B's"
    lines = [
        f"Schedule: {_chosen(timeline, request)}.",
        f"Activation memory: {used}{'' if limit is None else f', within the limit of {_percent(limit)}'}.",
        f"Bubble: {_percent(timeline.bubble)}{said}.",
    ]
    if limit is None:
        return "\n".join(lines)
    fitting = [line for line in named if line.limit <= limit * ranks + EPSILON]
    if not fitting:
        return "\n".join([*lines, "No schedule by name fits within the limit."])
    best = min(fitting, key=lambda line: line.makespan)
    lines.append(
        f"The shortest schedule by name within the limit is {best.schedule.name}, with a bubble of "
        f"{_percent(best.bubble)}; this one is {_compared(timeline, best)} it."
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
