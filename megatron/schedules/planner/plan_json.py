"""A plan as one JSON object, with everything its times, memory and bubble are computed from.

See docs/plan-json.md. The classes define the JSON Schema: docs/plan.schema.json is the output of :func:`schema`.
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
    """The request to the planner.

    schedule: name of the schedule.
    memory_limit: for adaptive, the activation memory limit of a rank, as a fraction of 1F1B's.
    chunk_choices: for adaptive, the allowed numbers of chunks per rank.
    search_seconds: for adaptive, search time in seconds; missing if it was not given.
    recompute: for adaptive, true if R may be used; otherwise missing.
    offload: for adaptive, true if O and L may be used; otherwise missing.
    """

    schedule: Name
    memory_limit: Quantity | UnsetType = UNSET
    chunk_choices: tuple[Count, ...] | UnsetType = UNSET
    search_seconds: Quantity | UnsetType = UNSET
    recompute: bool | UnsetType = UNSET
    offload: bool | UnsetType = UNSET

    @staticmethod
    def of(request: Request) -> AskedForm:
        """Returns the form of ``request``."""
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
    """Times, memory and bubble of the plan. Times are in the unit of the costs.

    makespan: iteration time, from 0 to the end of the last pass on any rank.
    bubble: share of the makespan in which an average rank computes nothing.
    span_bubble: the same for the worst rank, from the start of its first pass to the end of its last.
    peak_memory: peak activation memory of the worst rank, in microbatches of an average rank's layers.
    peak_memory_by_rank: peak activation memory of each rank, in the same unit.
    memory_of_1f1b: peak_memory as a fraction of 1F1B's, which is one microbatch per rank.
    recomputed: share of the computing that is R passes; missing without R.
    useful: share of the ranks' time in which they compute passes other than R; missing without R.
    copying: share of the makespan in which the busiest copy channel copies; missing without copies.
    hidden_messages: time of its experts' messages in which an average rank computes weight gradients; missing without
        such messages, as all figures of messages.
    exposed_messages: time in which an average rank waits for such messages and computes nothing.
    hidden_messages_by_rank, exposed_messages_by_rank: the same for each rank.
    lower_bound: for adaptive, a lower bound of the makespan of any schedule within the memory limit.
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
    hidden_messages: Quantity | UnsetType = UNSET
    exposed_messages: Quantity | UnsetType = UNSET
    hidden_messages_by_rank: tuple[Quantity, ...] | UnsetType = UNSET
    exposed_messages_by_rank: tuple[Quantity, ...] | UnsetType = UNSET
    lower_bound: Quantity | UnsetType = UNSET

    @staticmethod
    def of(timeline: Timeline, lower_bound: float | None = None) -> FiguresForm:
        """Returns the figures of ``timeline``, with an adaptive plan's lower bound."""
        ranks, hidden, exposed = timeline.schedule.ranks, timeline.hidden, timeline.exposed
        messages: dict[str, Any] = {
            "hidden_messages": sum(hidden) / ranks,
            "exposed_messages": sum(exposed) / ranks,
            "hidden_messages_by_rank": hidden,
            "exposed_messages_by_rank": exposed,
        }
        maybe: dict[str, Any] = {
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
            **{name: figure for name, figure in maybe.items() if figure},
            **(messages if any(hidden) or any(exposed) else {}),
        )


class PlanForm(Form, frozen=True, kw_only=True):
    """A plan: the order of the passes on each rank, the costs, and the figures computed from both.

    version: version of this format.
    name: name of the schedule; for adaptive, of the schedule that was chosen.
    placement: rank_of is the rank of each stage, in model order.
    microbatches: microbatches per iteration.
    asked: the request to the planner.
    costs: the costs as they were given.
    stage_costs: times and sizes of each stage; the figures are computed from these only.
    layers: decoder layers of each stage; missing without a model.
    recomputed: share of each stage's layers that R passes recompute.
    offloaded: share of each stage's layers that O and L passes offload.
    figures: times, memory and bubble of the plan.
    order: passes of each rank, first to last, each written as stage, kind, microbatch.
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
        """Returns the form of a plan.

        Args:
            timeline: the plan, timed with the costs it was planned for.
            asked: the request as it was made.
            planned: the request with all decisions settled.
            lower_bound: lower bound of an adaptive plan's makespan.
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
        """Returns the plan, timed by its stage costs.

        Raises:
            PlanError: if the form is not a valid plan; the message begins with the field.
        """
        form = ScheduleForm(name=self.name, placement=self.placement, microbatches=self.microbatches, order=self.order)
        schedule = form.schedule()
        costs = stage_costs(self.stage_costs, schedule.placement, "$.stage_costs")
        for kind in sorted(schedule.kinds):
            if lacking := [part for part in KINDS[kind].parts or (kind,) if part not in costs.times]:
                raise PlanError(f"$.stage_costs.times lacks {lacking[0].value!r}, and the order has such passes")
        for name, by_stage in (("layers", self.layers), ("recomputed", self.recomputed), ("offloaded", self.offloaded)):
            if by_stage is not UNSET:
                check_length(by_stage, schedule.placement.stages, f"$.{name}", "stage")
        return simulate(schedule, costs)


def to_text(form: PlanForm) -> str:
    """Returns the plan as one JSON object."""
    return encode(form)


def from_text(text: str) -> Timeline:
    """Reads the output of :func:`to_text`.

    Raises:
        PlanError: if the text is not a valid plan; the message begins with the field.
    """
    check_version(text, _VERSION)
    return decode(text, PlanForm).timeline()


def schema() -> str:
    """Returns the JSON Schema of a plan."""
    made: dict[str, Any] = msgspec.json.schema(PlanForm)
    text = json.dumps(made["$defs"])
    for name in sorted(made["$defs"], key=len, reverse=True):
        # The name of a generic class includes its type parameters. Each class is used with one set of them only, so
        # they are dropped.
        text = text.replace(json.dumps(name), json.dumps(_plain(name))).replace(f'/{name}"', f'/{_plain(name)}"')
    definitions = {
        name: definition | {"title": name, "description": inspect.cleandoc(definition["description"])}
        for name, definition in json.loads(text).items()
    }
    root = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megatron-schedules plan"}
    return json.dumps(root | {"$ref": made["$ref"], "$defs": definitions}, indent=1) + "\n"


def _plain(name: str) -> str:
    return name.partition("_")[0]
