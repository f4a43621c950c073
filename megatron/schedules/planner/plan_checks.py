"""Checks that a plan, a layer partition, or shares of recompute and offload answer a request, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.planner.adaptive import limit_in_microbatches, placements
from megatron.schedules.planner.registry import NAMES, Request, placement, splits
from megatron.schedules.schedule.kinds import OF_RANKS, PARTS, SAVING, SPLIT, WHOLES
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted

# Shares of layers are sums of rounded ones.
_ROUNDED = 1e-6


def check_plan(schedule: Schedule, request: Request) -> None:
    """Check that ``schedule`` is a plan that ``request`` can have, though not that it is the shortest.

    A schedule by name has no memory limit: what it holds is not checked.

    Raises:
        PlanError: where its name, size, placement, passes or memory is not what the request asks for.
    """
    if (schedule.ranks, schedule.microbatches) != (request.ranks, request.microbatches):
        raise PlanError(
            f"the plan is for {schedule.ranks} ranks and {counted(schedule.microbatches, 'microbatch')}, "
            f"not {request.ranks} and {request.microbatches}"
        )
    _check_name(schedule, request)
    validate(schedule)
    _check_kinds(schedule, request)
    _check_memory(schedule, request)


def _check_name(schedule: Schedule, request: Request) -> None:
    """Its name is the one asked for, or, for ``adaptive``, any; and its stages are where that name puts them."""
    name, where, searched = schedule.name, schedule.placement, request.schedule == "adaptive"
    if name not in NAMES or (name != request.schedule and not (searched and name != "file")):
        raise PlanError(f"the plan is {name!r}, not {request.schedule}")
    allowed = _placements(replace(request, schedule=name))
    if searched and name != "adaptive":
        allowed = [
            each for each in allowed if each.chunks in request.chunk_choices and request.placement in (None, each)
        ]
    if where not in allowed:
        raise PlanError(f"the plan is placed on {where}, which the request does not allow")


def _check_kinds(schedule: Schedule, request: Request) -> None:
    """Its passes are those that its name has, and the recompute, offload and vocabulary passes that are decided."""
    doing = request.costs_on(schedule.placement).doing(schedule.placement)
    usual = {*SPLIT, *WHOLES.values()} - (set() if splits(schedule.name) else PARTS)
    for stage, kind in {(stage, kind) for _, (stage, kind, _) in schedule.passes()}:
        optional = kind in SAVING or kind in OF_RANKS
        if stage not in doing.get(kind, ()) if optional else kind not in usual:
            raise PlanError(f"the plan has passes {kind} on stage {stage}, which the request does not allow")
    if request.costs.shared_vocabulary and not schedule.kinds.issuperset(OF_RANKS):
        raise PlanError(f"the plan has no {' and '.join(OF_RANKS)}, which a shared vocabulary takes")


def _check_memory(schedule: Schedule, request: Request) -> None:
    """It holds what the request's memory limit allows. Only ``adaptive`` has one."""
    if request.schedule != "adaptive":
        return
    costs, limit = request.costs_on(schedule.placement), limit_in_microbatches(request)
    held = costs.within(schedule.placement, peaks(schedule, costs))
    if held > limit + EPSILON:
        raise PlanError(f"the plan holds {held:g} microbatches, and the request allows {limit:g}")


def check_layers(layers: Sequence[int], chunk_choices: Sequence[int], request: Request) -> None:
    """Check that ``request`` can have so many layers on each stage, with so many stages a rank.

    Raises:
        PlanError: saying what does not go together.
    """
    model = request.costs.model
    if model is None:
        raise PlanError("layers can be placed where the model is known", "layers")
    where = _chosen(chunk_choices, request) if request.schedule == "adaptive" else _placements(request)[0]
    if request.schedule != "adaptive" and tuple(chunk_choices) != request.chunk_choices:
        raise PlanError(f"the number of chunks is not chosen by {request.schedule}", "chunks")
    if len(layers) != where.stages or min(layers) < 0 or sum(layers) != len(model.layers):
        raise PlanError(f"{sum(layers)} layers on {len(layers)} stages given for {len(model.layers)} on {where}")


def check_shares(
    recomputed: Sequence[float] | None,
    offloaded: Sequence[float] | None,
    chunk_choices: Sequence[int],
    request: Request,
) -> None:
    """Check that ``request`` allows these shares of each stage's layers, with so many stages a rank.

    Raises:
        PlanError: saying what it does not allow.
    """
    if recomputed is None and offloaded is None and tuple(chunk_choices) == request.chunk_choices:
        return
    stages = _chosen(chunk_choices, request).stages
    none = (0.0,) * stages
    for what, shares, allowed in (
        ("recompute", recomputed, request.recompute),
        ("offload", offloaded, request.offload),
    ):
        if shares is None:
            continue
        if not allowed:
            raise PlanError(f"the request does not allow {what}")
        if len(shares) != stages or not all(0 <= share <= 1 for share in shares):
            raise PlanError(f"{what} needs a share from 0 to 1 for each of {stages} stages")
    if any(sum(both) > 1 + _ROUNDED for both in zip(recomputed or none, offloaded or none, strict=True)):
        raise PlanError("a stage has more layers recomputed and offloaded than it has")


def _placements(request: Request) -> list[Placement]:
    """Where the stages of a plan for ``request`` may be."""
    known = placement(request)
    return placements(request) if request.schedule == "adaptive" or known is None else [known]


def _chosen(chunk_choices: Sequence[int], request: Request) -> Placement:
    """The placement with the one number of chunks that was chosen for ``request``."""
    found = [where for where in placements(request) if [where.chunks] == list(chunk_choices)]
    if not found:
        raise PlanError(f"{list(chunk_choices)} chunks are not a choice of the request's", "chunks")
    return found[0]
