"""Replans with measured costs, and decides if the new plan should replace the running one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.json_files import decode, encode

# Smaller relative gains are within the measurement error, and not worth a switch.
_WORTH = 0.005
# Tolerance of memory limits for rounding, microbatches.
_ROUNDING = 1e-6


class Expected(NamedTuple):
    """Expected times of an order under measured costs.

    Args:
        makespan: iteration time, in milliseconds, the unit of the measured costs.
        bubble: share of the makespan in which an average rank computes nothing.
    """

    makespan: float
    bubble: float


@dataclass(frozen=True)
class Proposal:
    """Result of replanning.

    Args:
        before: expected times of the running plan under the measured costs.
        after: expected times of the new plan.
        csv: rows of the new plan; empty to keep the running plan.
    """

    before: Expected
    after: Expected
    csv: str

    def to_text(self) -> str:
        """Returns the proposal as one JSON object."""
        return encode(self)

    @staticmethod
    def from_text(text: str) -> Proposal:
        """Reads the output of :meth:`to_text`; raises :class:`.PlanError` for anything else."""
        return decode(text, Proposal)


def propose(request: Request, current: Schedule) -> Proposal:
    """Plans ``request`` again on the placement of ``current``, and compares both plans.

    Args:
        request: the request, with measured costs and the memory limit that applies from now on.
        current: the running schedule.

    Raises:
        PlanError: if there is no plan.
    """
    costs = request.costs_on(current.placement)
    now = simulate(current, costs)
    planned = make_plan(replace(request, placement=current.placement)).timeline
    before, after = Expected(now.makespan, now.bubble), Expected(planned.makespan, planned.bubble)
    limit = request.memory_limit
    too_much = limit is not None and now.limit > limit * request.ranks + _ROUNDING
    better = planned.schedule.placement == current.placement and after.makespan < (1 - _WORTH) * before.makespan
    if not (better or too_much) or planned.schedule.order == current.order:
        return Proposal(before, before, "")
    return Proposal(before, after, to_csv(planned.schedule))


def read_rows(csv: str, current: Schedule) -> Schedule:
    """Returns the plan with the rows in ``csv``, with the placement and number of microbatches of ``current``.

    Raises:
        PlanError: if a pass is missing, repeated or on the wrong rank.
    """
    rows = tuple(tuple(map(Pass.parse, line.split(","))) for line in csv.splitlines())
    schedule = replace(current, order=rows)
    validate(schedule)
    return schedule


def with_room_for(running: Timeline, request: Request) -> Request:
    """Limits ``request`` of a job without a memory limit to the measured memory of its plan ``running``.

    Otherwise the replacement plan could be slower, only because passes use more memory than assumed.
    """
    if request.memory_limit is None:
        return request
    return replace(request, memory_limit=max(request.memory_limit, running.limit / request.ranks))


def digest(csv: str, placement: Placement, request: Request) -> str:
    """Hash of a plan, its placement, and the costs and decisions that set the order of its messages."""
    return hashlib.sha256(f"{csv}{placement.rank_of}{request.costs!r}{request.decisions!r}".encode()).hexdigest()


def moved(old: Schedule, new: Schedule) -> int:
    """Number of passes whose position in their rank's order changed."""
    pairs = zip(old.order, new.order, strict=True)
    return sum(_elsewhere(was, now) for was, now in pairs)


def _elsewhere(was: Sequence[Pass], now: Sequence[Pass]) -> int:
    place = {work: index for index, work in enumerate(was)}
    return sum(place.get(work) != index for index, work in enumerate(now))
