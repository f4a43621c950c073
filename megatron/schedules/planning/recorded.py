"""A recorded run: one iteration as it happened, beside what was planned for it, as plain data and as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.given import read_text
from megatron.schedules.planning.kinds import Kind, Share
from megatron.schedules.planning.passes import Pass
from megatron.schedules.planning.simulate import Copy, Timeline, simulate
from megatron.schedules.planning.stage_costs import StageCosts
from megatron.schedules.planning.textforms import from_record, to_record

Steps = tuple[tuple[float, float], ...]
"""(time, what is held from then on), ascending."""


@dataclass(frozen=True)
class Recorded:
    """One iteration, on one clock for all ranks.

    Args:
        timeline: when each pass began, after what it waited for had come, and when it ended: milliseconds from the
            first start of any. Its costs are the medians measured.
        planned: the same schedule under the costs it was planned for, in the unit of those.
        iteration: of the training run.
        device: what it ran on.
        held: by rank, bytes of activations over time in milliseconds; empty where they were not counted.
    """

    timeline: Timeline
    planned: Timeline
    iteration: int
    device: str
    held: tuple[Steps, ...] = ()


def to_text(recorded: Recorded) -> str:
    """The recorded run as one JSON object."""
    timeline = recorded.timeline
    return json.dumps(
        {
            "version": 1,
            "iteration": recorded.iteration,
            "device": recorded.device,
            "schedule": to_record(timeline.schedule),
            "planned_costs": _written(recorded.planned.costs),
            "costs": _written(timeline.costs),
            "start": timeline.start,
            "end": timeline.end,
            "copies": [[[str(work), *times] for work, *times in rank] for rank in timeline.copies],
            "held": recorded.held,
        }
    )


def read_recorded(path: Path) -> Recorded:
    """The recorded run in the file ``path``.

    Raises:
        PlanError: in one line, what is wrong with the file.
    """
    writer, text = "--pipeline-timeline writes such files", read_text(path, "recorded")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise PlanError(f"{path} is no JSON; {writer}", "recorded") from None
    try:
        return _read(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"lacks {error.args[0]!r}" if isinstance(error, KeyError) else f"holds something else: {error}"
        raise PlanError(f"{path} is no recorded run: it {what}; {writer}", "recorded") from None


def _read(data: Mapping[str, Any]) -> Recorded:
    if data["version"] != 1:
        raise ValueError(f"version {data['version']}, and 1 is read here")
    schedule = from_record(data["schedule"])
    start, end = (_times(data[name], schedule.order) for name in ("start", "end"))
    copies = tuple(
        tuple(Copy(Pass.parse(work), float(begun), float(over)) for work, begun, over in rank)
        for rank in data["copies"]
    )
    held = tuple(tuple((float(time), float(amount)) for time, amount in rank) for rank in data["held"])
    return Recorded(
        Timeline(schedule, _costs(data["costs"]), start, end, copies),
        simulate(schedule, _costs(data["planned_costs"])),
        int(data["iteration"]),
        str(data["device"]),
        held,
    )


def _times(rows: Sequence[Sequence[Any]], order: Sequence[Sequence[Pass]]) -> tuple[tuple[float, ...], ...]:
    found = tuple(tuple(float(time) for time in row) for row in rows)
    if list(map(len, found)) != list(map(len, order)) or not all(map(math.isfinite, (t for row in found for t in row))):
        raise ValueError("each pass must have a start and an end")
    return found


def _written(costs: StageCosts) -> dict[str, Any]:
    return {
        "times": {kind.value: times for kind, times in costs.times.items()},
        "activation": costs.activation,
        "comm": costs.comm,
        "held": {share.name: held for share, held in costs.held.items()},
        "standing": costs.standing,
        "one_way": costs.one_way,
        "hops": [[*pair, latency] for pair, latency in costs.hops.items()],
    }


def _costs(data: Mapping[str, Any]) -> StageCosts:
    return StageCosts(
        {Kind(kind): tuple(map(float, times)) for kind, times in data["times"].items()},
        tuple(map(float, data["activation"])),
        float(data["comm"]),
        {Share[name]: tuple(map(float, held)) for name, held in data["held"].items()},
        tuple(map(float, data["standing"])),
        bool(data["one_way"]),
        {(int(source), int(to)): float(latency) for source, to, latency in data["hops"]},
    )
