"""Schedules with O and L inserted at any cost: a planner would not make them, but a run must support them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.schedule import Schedule

Distances = Callable[[int, int], tuple[int, int] | None]
"""For a stage and a microbatch, how many passes after its F its O stands, and how many before its I or B its L; None
for neither."""


def offloaded(schedule: Schedule, distances: Distances = lambda stage, microbatch: (2, 2)) -> Schedule:
    """Returns ``schedule`` with O and L; where they would cross L comes right after O."""
    rows = (_with_copies(row, distances) for row in schedule.order)
    return replace(schedule, order=tuple(rows))


def _with_copies(row: tuple[Pass, ...], distances: Distances) -> tuple[Pass, ...]:
    backward = {(work.stage, work.microbatch): at for at, work in enumerate(row) if work.kind in (Kind.I, Kind.B)}
    placed: list[tuple[int, int, Pass]] = [(at, 2, work) for at, work in enumerate(row)]
    for at, work in enumerate(row):
        key = work.stage, work.microbatch
        chosen = distances(*key) if work.kind is Kind.F and key in backward else None
        if chosen is not None:
            end = backward[key]
            out = min(at + 1 + chosen[0], end)
            placed.append((out, 0, work._replace(kind=Kind.O)))
            placed.append((max(end - chosen[1], out), 1, work._replace(kind=Kind.L)))
    return tuple(work for _, _, work in sorted(placed, key=lambda each: each[:2]))
