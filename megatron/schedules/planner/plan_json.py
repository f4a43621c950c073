"""A plan as one JSON object, with all that its times, memory and bubble follow from. docs/plan-json.md explains it.

The classes here are its schema, too: docs/plan.schema.json is what :func:`schema` makes of them.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.costs_json import GivenCostsForm, Quantity, StageCostsForm, stage_costs
from megatron.schedules.schedule.kinds import KINDS
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.text_forms import PlacementForm, ScheduleForm
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import (
    Count,
    Form,
    Index,
    Name,
    Portion,
    check_length,
    check_version,
    decode,
    encode,
)

_VERSION = 1


class AskedForm(Form, frozen=True, kw_only=True):
    """What was asked of the planner.

    schedule: the name of the schedule.
    memory_limit: for adaptive, the activation memory that a rank may hold, as a fraction of 1F1B's.
    chunk_choices: for adaptive, how many chunks a rank may have.
    search_seconds: for adaptive, how long to search, where that was given.
    recompute, offload: for adaptive, whether R, or O and L, may be used; missing where not.
    """

    schedule: Name
    memory_limit: Quantity | UnsetType = UNSET
    chunk_choices: tuple[Count, ...] | UnsetType = UNSET
    search_seconds: Quantity | UnsetType = UNSET
    recompute: bool | UnsetType = UNSET
    offload: bool | UnsetType = UNSET

    @staticmethod
    def of(request: Request) -> AskedForm:
        """``request`` as it is written."""
        if request.memory_limit is None:
            return AskedForm(schedule=request.schedule)
        return AskedForm(
            schedule=request.schedule,
            memory_limit=request.memory_limit,
            chunk_choices=request.chunk_choices,
            search_seconds=UNSET if request.search_seconds is None else request.search_seconds,
            recompute=request.recompute or UNSET,
            offload=request.offload or UNSET,
        )


class FiguresForm(Form, frozen=True, kw_only=True):
    """The figures of the plan. Times are in the unit of the costs.

    makespan: the iteration time, from 0 to the last end on any rank.
    bubble: the part of it in which an average rank computes nothing.
    span_bubble: the same for the worst rank, from its first start to its last end.
    peak_memory: peak activation memory of the worst rank, in microbatches' worth of a rank's activations.
    peak_memory_by_rank: that of each rank.
    memory_of_1f1b: the worst rank's peak over the number of ranks, which is what 1F1B holds.
    recomputed: the part of the computing that R passes do; missing without R.
    useful: the part of the ranks' time in which they compute anything but R passes; missing without R.
    copying: the part of the makespan in which the busiest copy channel copies; missing without copies.
    lower_bound: for adaptive, no schedule within the memory limit has a shorter makespan.
    """

    makespan: Quantity
    bubble: Portion
    span_bubble: Portion
    peak_memory: Quantity
    peak_memory_by_rank: tuple[Quantity, ...]
    memory_of_1f1b: Quantity
    recomputed: Portion | UnsetType = UNSET
    useful: Portion | UnsetType = UNSET
    copying: Portion | UnsetType = UNSET
    lower_bound: Quantity | UnsetType = UNSET

    @staticmethod
    def of(timeline: Timeline, lower_bound: float | None = None) -> FiguresForm:
        """What ``timeline`` comes to, with the bound of an adaptive plan."""
        maybe = {
            "recomputed": timeline.recomputed,
            "useful": timeline.useful if timeline.recomputed else 0.0,
            "copying": timeline.copying,
            "lower_bound": lower_bound,
        }
        return FiguresForm(
            makespan=timeline.makespan,
            bubble=timeline.bubble,
            span_bubble=timeline.span_bubble,
            peak_memory=timeline.peak,
            peak_memory_by_rank=timeline.peaks,
            memory_of_1f1b=timeline.peak / timeline.schedule.ranks,
            **{name: each for name, each in maybe.items() if each},
        )


class PlanForm(Form, frozen=True, kw_only=True):
    """A plan: the order of the passes on every rank, what they cost, and the figures that follow.

    version: of this form.
    name: of the schedule; for adaptive, of the one that was chosen.
    placement: rank_of is the rank of each stage, in model order.
    microbatches: of one iteration.
    asked: what was asked of the planner.
    costs: as they were given.
    stage_costs: the times and sizes of every stage, which are all that the figures follow from.
    layers: decoder layers of each stage; missing without a model.
    recomputed, offloaded: the part of each stage's layers that R passes recompute, and that O and L offload.
    figures: what it comes to.
    order: for each rank its passes, first to last, each written as stage, kind, microbatch.
    """

    version: int
    name: Name
    placement: PlacementForm
    microbatches: Count
    asked: AskedForm
    costs: GivenCostsForm
    stage_costs: StageCostsForm[Quantity]
    layers: tuple[Index, ...] | UnsetType = UNSET
    recomputed: tuple[Portion, ...] | UnsetType = UNSET
    offloaded: tuple[Portion, ...] | UnsetType = UNSET
    figures: FiguresForm
    order: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(timeline: Timeline, asked: Request, planned: Request, lower_bound: float | None = None) -> PlanForm:
        """A plan as it is written.

        Args:
            timeline: the plan under the costs it was planned for.
            asked: what was asked for.
            planned: the same with its decisions settled.
            lower_bound: of an adaptive plan's iteration time.
        """
        schedule, decided = ScheduleForm.of(timeline.schedule), planned.decisions
        layers = planned.layers_on(timeline.schedule.placement)
        return PlanForm(
            version=_VERSION,
            name=schedule.name,
            placement=schedule.placement,
            microbatches=schedule.microbatches,
            asked=AskedForm.of(asked),
            costs=GivenCostsForm.of(planned.costs),
            stage_costs=StageCostsForm.of(timeline.costs),
            layers=UNSET if layers is None else layers,
            recomputed=UNSET if decided.recomputed is None else decided.recomputed,
            offloaded=UNSET if decided.offloaded is None else decided.offloaded,
            figures=FiguresForm.of(timeline, lower_bound),
            order=schedule.order,
        )

    def timeline(self) -> Timeline:
        """The plan, timed by its stage costs; raises :class:`.PlanError`, the field first, where it is none."""
        form = ScheduleForm(name=self.name, placement=self.placement, microbatches=self.microbatches, order=self.order)
        schedule = form.schedule()
        costs = stage_costs(self.stage_costs, schedule.placement, "$.stage_costs")
        for kind in sorted(schedule.kinds):
            if lacking := [part for part in KINDS[kind].parts or (kind,) if part not in costs.times]:
                raise PlanError(f"$.stage_costs.times lacks {lacking[0].value!r}, and the order has such passes")
        for name, each in (("layers", self.layers), ("recomputed", self.recomputed), ("offloaded", self.offloaded)):
            if each is not UNSET:
                check_length(each, schedule.placement.stages, f"$.{name}", "stage")
        return simulate(schedule, costs)


def to_text(form: PlanForm) -> str:
    """The plan as one JSON object."""
    return encode(form)


def from_text(text: str) -> Timeline:
    """Read what :func:`to_text` wrote; raises :class:`.PlanError`, the field first, for anything else."""
    check_version(text, _VERSION)
    return decode(text, PlanForm).timeline()


def schema() -> str:
    """The JSON Schema of a plan."""
    made: dict[str, Any] = msgspec.json.schema(PlanForm)
    text = json.dumps(made["$defs"])
    for name in sorted(made["$defs"], key=len, reverse=True):
        # A generic class is called by its parameters, too; there is but one of each here.
        text = text.replace(json.dumps(name), json.dumps(_plain(name))).replace(f'/{name}"', f'/{_plain(name)}"')
    definitions = {
        name: each | {"title": name, "description": inspect.cleandoc(each["description"])}
        for name, each in json.loads(text).items()
    }
    root = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megatron-schedules plan"}
    return json.dumps(root | {"$ref": made["$ref"], "$defs": definitions}, indent=1) + "\n"


def _plain(name: str) -> str:
    return name.partition("_")[0]
