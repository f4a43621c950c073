"""A recorded run: one measured iteration and its plan, as plain data and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from megatron.schedules.schedule.costs_json import StageCostsForm, stage_costs
from megatron.schedules.schedule.kinds import COMPUTING
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Copy, Timeline, simulate
from megatron.schedules.schedule.text_forms import ScheduleForm, read_pass
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import (
    LEAST,
    MOST,
    Amount,
    Form,
    Index,
    Name,
    check_length,
    check_version,
    decode,
    encode,
    read_file,
)
from megatron.schedules.utils.printable import printable_name

_VERSION = 1
# Milliseconds by which times of a rank may disagree, for rounding.
_APART = 1e-3

Moment = Annotated[float, Meta(ge=-_APART, le=MOST)]
"""Milliseconds since the first start of any pass."""
Held = Annotated[float, Meta(ge=-MOST, le=MOST)]
"""Bytes; below zero where the iteration freed some."""
Steps = tuple[tuple[float, float], ...]
"""(time, memory from then on), ascending."""


@dataclass(frozen=True)
class Recorded:
    """One iteration, on one clock for all ranks.

    Args:
        timeline: start and end of each pass, in milliseconds from the first start on any rank. A pass starts when
            everything that it waits for has arrived. Its costs are the measured medians.
        planned: the same schedule under the costs of its plan, in their unit.
        iteration: number in the training run.
        device: name of the device.
        held: bytes of activations of each rank over time; empty if not measured.
    """

    timeline: Timeline
    planned: Timeline
    iteration: int
    device: str
    held: tuple[Steps, ...] = ()


class RecordedForm(Form, frozen=True, kw_only=True):
    """:class:`Recorded` in the file."""

    version: int
    iteration: Index
    device: Name
    schedule: ScheduleForm
    planned_costs: StageCostsForm[Amount]
    costs: StageCostsForm[Amount]
    start: tuple[tuple[Moment, ...], ...]
    end: tuple[tuple[Moment, ...], ...]
    copies: tuple[tuple[tuple[str, Moment, Moment], ...], ...]
    held: tuple[Annotated[tuple[tuple[Moment, Held], ...], Meta(min_length=1)], ...]


def to_text(recorded: Recorded) -> str:
    """Writes the recorded run as one JSON object."""
    timeline = recorded.timeline
    schedule = replace(timeline.schedule, name=printable_name(timeline.schedule.name))
    return encode(
        RecordedForm(
            version=_VERSION,
            iteration=recorded.iteration,
            device=printable_name(recorded.device),
            schedule=ScheduleForm.of(schedule),
            planned_costs=StageCostsForm.of(recorded.planned.costs),
            costs=StageCostsForm.of(timeline.costs),
            start=timeline.start,
            end=timeline.end,
            copies=tuple(tuple((str(work), start, end) for work, start, end in rank) for rank in timeline.copies),
            held=recorded.held,
        )
    )


def read_recorded(path: Path) -> Recorded:
    """Reads the recorded run in the file ``path``.

    Raises:
        PlanError: what is wrong with the file.
    """
    return read_file(path, "recorded", "recorded run", "--pipeline-measure writes such files", from_text)


def from_text(text: str) -> Recorded:
    """Reads what :func:`to_text` wrote; raises :class:`.PlanError`, which begins with the field, for anything else."""
    check_version(text, _VERSION)
    form = decode(text, RecordedForm)
    schedule = form.schedule.schedule("$.schedule")
    planned, measured = (
        stage_costs(costs, schedule.placement, f"$.{name}")
        for name, costs in (("planned_costs", form.planned_costs), ("costs", form.costs))
    )
    _check_passes(form, schedule)
    if form.held:
        check_length(form.held, schedule.ranks, "$.held", "rank")
    for rank, steps in enumerate(form.held):
        _check_ascending([time for time, _ in steps], f"$.held[{rank}]")
    timeline = simulate(schedule, planned)
    for rank, (start, end) in enumerate(zip(timeline.start, timeline.end, strict=True)):
        if end[-1] - start[0] < LEAST:
            raise PlanError(f"$.planned_costs.times: the passes of rank {rank} must take time")
    return Recorded(
        Timeline(schedule, measured, form.start, form.end, _copies(form, schedule)),
        timeline,
        form.iteration,
        form.device,
        form.held,
    )


def _check_passes(form: RecordedForm, schedule: Schedule) -> None:
    """Raises :class:`.PlanError` if passes of a rank overlap."""
    for name, rows in (("start", form.start), ("end", form.end)):
        check_length(rows, schedule.ranks, f"$.{name}", "rank")
        for rank, (row, order) in enumerate(zip(rows, schedule.order, strict=True)):
            check_length(row, len(order), f"$.{name}[{rank}]", "pass of the rank")
    for rank, (start, end) in enumerate(zip(form.start, form.end, strict=True)):
        for index, (begun, over) in enumerate(zip(start, end, strict=True)):
            if over < begun - _APART:
                raise PlanError(f"$.end[{rank}][{index}] is {over:g}, before the start of the pass at {begun:g}")
            if index and begun < end[index - 1] - _APART:
                raise PlanError(
                    f"$.start[{rank}][{index}] is {begun:g}, before the end of the pass before it at {end[index - 1]:g}"
                )
        if sum(end) - sum(start) < LEAST:
            raise PlanError(f"$.end[{rank}]: the passes of a rank must take time")


def _copies(form: RecordedForm, schedule: Schedule) -> tuple[tuple[Copy, ...], ...]:
    if form.copies:
        check_length(form.copies, schedule.ranks, "$.copies", "rank")
    by_rank = []
    for rank, row in enumerate(form.copies):
        copies, order = [], {work for work in schedule.order[rank] if work.kind not in COMPUTING}
        for index, (cell, start, end) in enumerate(row):
            at = f"$.copies[{rank}][{index}]"
            work = read_pass(cell, at)
            if work not in order:
                raise PlanError(f"{at}: {work} is no copy that rank {rank} makes, or makes once more")
            if end < start - _APART:
                raise PlanError(f"{at} ends at {end:g}, before its start at {start:g}")
            order.remove(work)
            copies.append(Copy(work, start, end))
        by_rank.append(tuple(copies))
    return tuple(by_rank)


def _check_ascending(times: Sequence[float], at: str) -> None:
    for index, (time, later) in enumerate(pairwise(times), start=1):
        if later < time - _APART:
            raise PlanError(f"{at}[{index}] is at {later:g}, before the step before it at {time:g}")
