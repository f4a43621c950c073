"""Text forms of a schedule: torch.distributed.pipelining's compute-only CSV, and JSON."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron.schedules.schedule import placement as placements
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Rows, Schedule
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Count, Form, Index, Name, convert, decode, encode


def to_csv(schedule: Schedule) -> str:
    """Returns the CSV that ``_PipelineScheduleRuntime._load_csv`` reads: a row per rank, a cell per pass, no header.

    That reader does not support R, O, L, S and T.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([str(work) for work in row] for row in schedule.order)
    return text.getvalue()


def from_csv(text: str, name: str = "file") -> Schedule:
    """Reads a compute-only CSV and derives the placement and the number of microbatches from it.

    Empty cells (torch's idle slots) are ignored. Every rank must have the same number of stages.

    Raises:
        PlanError: names the row and the cell that cannot be read, or the reason why the order is not a schedule.
    """
    try:
        return _read_rows(text, name)
    except PlanError as error:
        named = name == "file" or str(error).startswith(name)
        raise PlanError(str(error) if named else f"{name}: {error}", "csv") from None


def _read_rows(text: str, name: str) -> Schedule:
    reader = csv.reader(text.splitlines())
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise PlanError(f"CSV row {reader.line_num} cannot be read: {error}") from None
    if not rows:
        raise PlanError("the schedule's CSV is empty: one row a rank is needed, its cells passes such as 0F0,0B0")
    order: list[tuple[Pass, ...]] = []
    for line, row in rows:
        passes = []
        for column, cell in enumerate(row):
            if cell.strip():
                try:
                    passes.append(Pass.parse(cell))
                except PlanError as error:
                    raise PlanError(f"CSV row {line}, cell {column + 1}: {error}") from None
        order.append(tuple(passes))
    schedule = Schedule(name, _read_placement(order), _count(order), tuple(order))
    validate(schedule)
    return schedule


def _count(order: list[tuple[Pass, ...]]) -> int:
    return 1 + max((work.microbatch for row in order for work in row), default=-1)


def _read_placement(order: list[tuple[Pass, ...]]) -> Placement:
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(order):
        for work in row:
            if rank_of.setdefault(work.stage, rank) != rank:
                raise PlanError(
                    f"stage {work.stage} stands on rank {rank_of[work.stage]} and on rank {rank}; a stage has one rank"
                )
    stages = len(rank_of)
    if sorted(rank_of) != list(range(stages)) or stages % len(order):
        raise PlanError(
            f"stages must be numbered from 0 with equally many on each of the {len(order)} ranks, not {sorted(rank_of)}"
        )
    by_stage = tuple(rank_of[stage] for stage in range(stages))
    if any(by_stage.count(rank) * len(order) != stages for rank in range(len(order))):
        raise PlanError(
            f"every rank must hold equally many stages; the CSV gives {[by_stage.count(r) for r in range(len(order))]}"
        )
    chunks = stages // len(order)
    for known in (placements.interleaved, placements.zigzag):
        if known(len(order), chunks).rank_of == by_stage:
            return known(len(order), chunks) if chunks > 1 else placements.sequential(len(order))
    return Placement("custom", by_stage)


class PlacementForm(Form, frozen=True, kw_only=True):
    """Placement in a file."""

    name: Name
    rank_of: Annotated[tuple[Index, ...], Meta(min_length=1)]

    @staticmethod
    def of(placement: Placement) -> PlacementForm:
        """Returns the form of ``placement``."""
        return PlacementForm(name=placement.name, rank_of=placement.rank_of)

    def placement(self, at: str) -> Placement:
        """Returns the :class:`.Placement`; raises :class:`PlanError` with the path ``at`` if it is invalid."""
        try:
            return Placement(self.name, self.rank_of)
        except PlanError as error:
            raise PlanError(f"{at}.rank_of: {error}") from None


class ScheduleForm(Form, frozen=True, kw_only=True):
    """Schedule in a file."""

    name: Name
    placement: PlacementForm
    microbatches: Count
    order: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(schedule: Schedule) -> ScheduleForm:
        """Returns the form of ``schedule``."""
        return ScheduleForm(
            name=schedule.name,
            placement=PlacementForm.of(schedule.placement),
            microbatches=schedule.microbatches,
            order=tuple(tuple(map(str, row)) for row in schedule.order),
        )

    def schedule(self, at: str = "$") -> Schedule:
        """Returns the :class:`.Schedule`; raises :class:`PlanError` with the path of the field that is invalid."""
        placement = self.placement.placement(f"{at}.placement")
        order: Rows = tuple(
            tuple(read_pass(cell, f"{at}.order[{rank}][{index}]") for index, cell in enumerate(row))
            for rank, row in enumerate(self.order)
        )
        schedule = Schedule(self.name, placement, self.microbatches, order)
        try:
            validate(schedule)
        except PlanError as error:
            raise PlanError(f"{at}.order: {error}") from None
        return schedule


def read_pass(cell: str, at: str) -> Pass:
    """Reads a pass from ``cell``; raises :class:`PlanError` with the path ``at`` if it is invalid."""
    try:
        return Pass.parse(cell)
    except PlanError as error:
        raise PlanError(f"{at}: {error}") from None


def to_json(schedule: Schedule) -> str:
    """Returns the schedule as a JSON object. :mod:`.plan_json` also writes its costs and figures."""
    return encode(ScheduleForm.of(schedule))


def to_record(schedule: Schedule) -> dict[str, Any]:
    """Returns the schedule as a dictionary that JSON can encode."""
    record: dict[str, Any] = msgspec.to_builtins(ScheduleForm.of(schedule))
    return record


def from_json(text: str) -> Schedule:
    """Reads JSON written by :func:`to_json` or :mod:`.plan_json`; raises :class:`PlanError` for anything else."""
    try:
        return decode(text, ScheduleForm).schedule()
    except PlanError as error:
        raise PlanError(f"this JSON is not a schedule: {error}") from None


def from_record(data: Any) -> Schedule:
    """Reads the result of :func:`to_record`; raises :class:`PlanError` for anything else."""
    try:
        return convert(data, ScheduleForm).schedule()
    except PlanError as error:
        raise PlanError(f"this JSON is not a schedule: {error}") from None
