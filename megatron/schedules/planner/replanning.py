"""Replanning for measured costs: whether the new plan is better than the one that runs, and what is expected of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.json_files import decode, encode

# Shorter by less is within what measuring is off by, and not worth a switch.
_WORTH = 0.005
# Of a microbatch, by which limits may be missed: rounding.
_ROUNDING = 1e-6


class Expected(NamedTuple):
    """What an order comes to under measured costs: its makespan in their unit, milliseconds, and its bubble."""

    makespan: float
    bubble: float


@dataclass(frozen=True)
class Proposal:
    """The outcome of replanning.

    Args:
        before: what the plan that runs comes to under the costs measured.
        after: what the plan found comes to.
        csv: the rows of that plan; empty where the plan that runs goes on.
    """

    before: Expected
    after: Expected
    csv: str

    def to_text(self) -> str:
        """As one JSON object."""
        return encode(self)

    @staticmethod
    def from_text(text: str) -> Proposal:
        """What :meth:`to_text` wrote; raises :class:`.PlanError` for anything else."""
        return decode(text, Proposal)


def propose(request: Request, current: Schedule) -> Proposal:
    """Plan ``request`` again, on the placement of ``current``, and hold both plans against one another.

    Args:
        request: with the costs measured, and a limit that holds from now on.
        current: what runs.

    Raises:
        PlanError: where there is no plan.
    """
    costs = request.costs_on(current.placement)
    now = simulate(current, costs)
    found = make_plan(replace(request, placement=current.placement)).timeline
    before, after = Expected(now.makespan, now.bubble), Expected(found.makespan, found.bubble)
    limit = request.memory_limit
    too_much = limit is not None and now.limit > limit * request.ranks + _ROUNDING
    better = found.schedule.placement == current.placement and after.makespan < (1 - _WORTH) * before.makespan
    if not (better or too_much) or found.schedule.order == current.order:
        return Proposal(before, before, "")
    return Proposal(before, after, to_csv(found.schedule))


def read_rows(csv: str, current: Schedule) -> Schedule:
    """The plan whose rows are ``csv``, on the placement of ``current`` and for as many microbatches.

    Raises:
        PlanError: where the rows are not all of its passes, each once, or where they are on other ranks.
    """
    rows = tuple(tuple(map(Pass.parse, line.split(","))) for line in csv.splitlines())
    schedule = replace(current, order=rows)
    validate(schedule)
    return schedule


def digest(csv: str, placement: Placement, request: Request) -> str:
    """Tells one plan, where its stages live and the costs by which its messages are placed from any other."""
    return hashlib.sha256(f"{csv}{placement.rank_of}{request.costs!r}{request.decisions!r}".encode()).hexdigest()


def moved(old: Schedule, new: Schedule) -> int:
    """How many passes stand elsewhere in their rank's order."""
    pairs = zip(old.order, new.order, strict=True)
    return sum(_elsewhere(was, now) for was, now in pairs)


def _elsewhere(was: Sequence[Pass], now: Sequence[Pass]) -> int:
    place = {work: index for index, work in enumerate(was)}
    return sum(place.get(work) != index for index, work in enumerate(now))
