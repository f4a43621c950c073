"""Checks that a plan, a layer partition, or recompute and offload shares answer a request, for example from a cache."""

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

# Tolerance: shares of layers are sums of rounded numbers.
_ROUNDED = 1e-6


def check_plan(schedule: Schedule, request: Request) -> None:
    """Checks that ``schedule`` is a valid plan for ``request``. It need not be the shortest.

    The memory of a named schedule is not checked, since it has no limit.

    Raises:
        PlanError: if its name, size, placement, passes or memory do not match the request.
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
    """Checks that the name is the requested one, or any for ``adaptive``, and that its placement is allowed."""
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
    """Checks that the passes are those of the schedule, and that optional passes are decided."""
    doing = request.costs_on(schedule.placement).doing(schedule.placement)
    usual = {*SPLIT, *WHOLES.values()} - (set() if splits(schedule.name) else PARTS)
    for stage, kind in {(stage, kind) for _, (stage, kind, _) in schedule.passes()}:
        optional = kind in SAVING or kind in OF_RANKS
        if stage not in doing.get(kind, ()) if optional else kind not in usual:
            raise PlanError(f"the plan has passes {kind} on stage {stage}, which the request does not allow")
    if request.costs.shared_vocabulary and not schedule.kinds.issuperset(OF_RANKS):
        raise PlanError(f"the plan has no {' and '.join(OF_RANKS)}, which a shared vocabulary takes")


def _check_memory(schedule: Schedule, request: Request) -> None:
    """Checks the memory limit, which only ``adaptive`` has."""
    if request.schedule != "adaptive":
        return
    costs, limit = request.costs_on(schedule.placement), limit_in_microbatches(request)
    held = costs.within(schedule.placement, peaks(schedule, costs))
    if held > limit + EPSILON:
        raise PlanError(f"the plan holds {held:g} microbatches, and the request allows {limit:g}")


def check_layers(layers: Sequence[int], chunk_choices: Sequence[int], request: Request) -> None:
    """Checks that ``request`` allows this layer partition, else raises :class:`.PlanError`."""
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
    """Checks that ``request`` allows these shares of each stage's layers (None: not decided), else raises PlanError."""
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
    """Placements that a plan for ``request`` may have."""
    known = placement(request)
    return placements(request) if request.schedule == "adaptive" or known is None else [known]


def _chosen(chunk_choices: Sequence[int], request: Request) -> Placement:
    """Placement with the one number of chunks that was chosen for ``request``."""
    found = [where for where in placements(request) if [where.chunks] == list(chunk_choices)]
    if not found:
        raise PlanError(f"{list(chunk_choices)} chunks are not a choice of the request's", "chunks")
    return found[0]
