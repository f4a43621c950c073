"""Chooses which stages recompute and which offload, so that the plan within the memory limit is shortest.

Recompute and offload cost the same for every layer, in computing or in copying. They free more memory where activations
are kept longer. Therefore the first stages of each rank, in model order, save memory first. They offload before they
recompute, since copies need the time. All ranks use the same shares, since ranks wait for one another.

Two numbers are searched: the share of a rank's layers that is recomputed, and the share that is offloaded. A short
climb (local search over orders) tries each pair that its lower bound does not rule out. The search starts from the best
pair of a grid and continues in ever smaller steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.schedules.planner.adaptive import (
    bound,
    effort,
    least_limit,
    limit_in_microbatches,
    placements,
    search_seconds,
)
from megatron.schedules.planner.partition_plans import CLEARLY, few_microbatches
from megatron.schedules.planner.registry import Request, plan, planned_makespan
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.utils.progress import Progress, unheard

# Steps per rank's layers: first on a grid, then finer.
_GRID, _FINEST = 8, 32
# Number of climbs that take as long as a full search, and the share of the progress that the grid takes.
_CLIMBS, _SEARCHING = 128, 0.5
# Number of finalists, and how many times longer the climbs are that compare them.
_FINALISTS, _LONGER = 3, 8


StageShares = tuple[float, ...]
"""Share of each stage's layers, in model order."""


class Shares(NamedTuple):
    """Recomputed and offloaded part of each rank's layers, in units of 1 / :data:`_FINEST`."""

    recomputed: int = 0
    offloaded: int = 0

    def by_stage(self, request: Request, placement: Placement) -> Decisions:
        """Decisions of ``request`` with these shares for each stage.

        The first layers of each rank are used, in whole layers if their number is known.
        """
        recomputed, offloaded = [0.0] * placement.stages, [0.0] * placement.stages
        counts = request.layers_on(placement)
        for rank in range(placement.ranks):
            moved = placement.chunks * self.offloaded / _FINEST
            either = moved + placement.chunks * self.recomputed / _FINEST
            for chunk, stage in enumerate(placement.stages_of(rank)):
                parts = counts[stage] if counts else _FINEST
                to_host, saved = (
                    round(parts * min(1.0, max(0.0, end - chunk))) / max(1, parts) for end in (moved, either)
                )
                offloaded[stage], recomputed[stage] = to_host, saved - to_host
        return request.decisions.saving(recomputed, offloaded)


def save_memory(
    request: Request, progress: Progress = unheard, planned: Callable[[Request], Schedule] = plan
) -> Request:
    """Returns ``request`` with the recompute and offload shares of the shortest plan found.

    The plan is never longer than without recompute and offload. If both are allowed, each alone is tried too. Plans are
    compared, except where a bound or a climb shows that one is clearly longer.

    Args:
        request: for ``adaptive``; its ``recompute`` and ``offload`` say which of them are allowed.
        progress: receives the progress of the search.
        planned: makes the plans to compare. With a cache, the best plan need not be made again.

    Raises:
        PlanError: if nothing can be planned within the memory limit.
    """
    limit = limit_in_microbatches(request)
    asked = [request]
    if request.recompute and request.offload:
        asked = [replace(request, offload=False), replace(request, recompute=False), request]
    fitting = [candidate for candidate in asked if least_limit(candidate) * request.ranks <= limit + EPSILON]
    climbs = [_Climbs(request, placement) for placement in placements(request)]
    part = 1 / len(fitting)
    settled = [_settled(candidate, climbs, lambda done: progress(part * done)) for candidate in fitting]
    shortest = min(length for _, length in settled)
    finalists = [candidate for candidate, length in settled if length <= CLEARLY * shortest]
    plain = saved(request, None, None, request.chunk_choices)
    if least_limit(plain) * request.ranks <= limit + EPSILON and bound(plain.around_one()) < CLEARLY * shortest:
        finalists.insert(0, plain)
    if len(finalists) == 1:
        return finalists[0]
    return min(finalists, key=lambda candidate: planned_makespan(candidate, planned))


def _settled(request: Request, climbs: Sequence[_Climbs], progress: Progress) -> tuple[Request, float]:
    """``request`` with the best shares found, and the makespan of a climb's plan with them."""
    first, *others = (_SharesSearch(request, climb) for climb in climbs)
    first.grid(lambda part: progress(part * _SEARCHING))
    for other in others:
        other.near(first)
    best = min((first, *others), key=lambda search: search.shortest)
    best.refine()
    decisions, length = best.settled()
    progress(1 - _SEARCHING)
    return saved(request, decisions.recomputed, decisions.offloaded, (best.chunks,)), length


def saved(
    request: Request, recomputed: StageShares | None, offloaded: StageShares | None, chunk_choices: tuple[int, ...]
) -> Request:
    """Returns ``request`` with these shares per stage and these numbers of chunks settled."""
    decisions = replace(request.decisions, recomputed=recomputed, offloaded=offloaded)
    return replace(request, decisions=decisions, recompute=False, offload=False, chunk_choices=chunk_choices)


def without_saving(request: Request) -> Request:
    """Returns ``request`` without recompute and offload.

    If no plan exists without them, the memory limit is raised, and numbers of chunks are left out with which no plan
    exists even with them.
    """
    if not (request.recompute or request.offload):
        return request
    limit, choices = limit_in_microbatches(request) / request.ranks, request.chunk_choices
    plain = saved(request, None, None, choices)
    if limit < least_limit(plain):
        fitting = [where.chunks for where in placements(request) if _fits(replace(request, placement=where))]
        plain = replace(plain, chunk_choices=tuple(chunks for chunks in choices if chunks in fitting))
    return replace(plain, memory_limit=max(limit, least_limit(plain)))


def _fits(request: Request) -> bool:
    """Checks whether a plan for ``request`` exists, with recompute and offload as it allows."""
    assert request.memory_limit is not None
    return least_limit(request) <= request.memory_limit + EPSILON


class _Climbs:
    """Climbs on one placement, each made once."""

    def __init__(self, request: Request, placement: Placement) -> None:
        from megatron.schedules.search.climb import Trials

        self.placement, self._request, self._limit = placement, request, limit_in_microbatches(request)
        self._costs = request.costs.around_one()
        self._microbatches = few_microbatches(request)
        seconds = search_seconds(replace(request, microbatches=self._microbatches))
        passes = effort(request.ranks, seconds) / _CLIMBS
        few, many = (n * 3 * placement.stages for n in (self._microbatches, request.microbatches))
        self._short = Trials(placement, self._microbatches, self._limit, passes / few)
        self._long = Trials(placement, request.microbatches, self._limit, _LONGER * passes / many)
        self._known: dict[tuple[Decisions, bool], float] = {}

    def length(self, decisions: Decisions, *, final: bool = False) -> float:
        """Makespan of the plan that a climb finds, with costs around 1; infinite if nothing fits."""
        if (decisions, final) not in self._known:
            climbs = self._long if final else self._short
            self._known[decisions, final] = climbs.makespan(self._on_stages(decisions))
        return self._known[decisions, final]

    def bound(self, decisions: Decisions) -> float:
        """Lower bound of the makespans of short climbs."""
        return lower_bound(self.placement, self._microbatches, self._on_stages(decisions), self._limit)

    def decisions(self, shares: Shares) -> Decisions:
        """Decisions with ``shares``."""
        return shares.by_stage(self._request, self.placement)

    def _on_stages(self, decisions: Decisions) -> StageCosts:
        return self._costs.on(self.placement, decisions)


class _SharesSearch:
    """Search on one placement.

    Args:
        request: says if recompute and offload are allowed.
        climbs: climbs on the placement.
    """

    def __init__(self, request: Request, climbs: _Climbs) -> None:
        self._request, self._climbs = request, climbs
        self.best, self.shortest = Shares(), math.inf
        self._hope = math.inf  # longer plans are of no use
        self._tried: dict[Decisions, float] = {}

    @property
    def chunks(self) -> int:
        """Chunks per rank."""
        return self._climbs.placement.chunks

    def grid(self, progress: Progress) -> None:
        """Tries evenly spaced shares: recompute alone, offload alone, and mixtures if both are allowed."""
        steps = [_FINEST * k // _GRID for k in range(_GRID + 1)]
        tried = [Shares(recomputed=k) for k in steps] if self._request.recompute else []
        tried += [Shares(offloaded=k) for k in steps] if self._request.offload else []
        if self._request.recompute and self._request.offload:
            tried += [Shares(recomputed=k // 2, offloaded=k // 2) for k in steps] + [
                Shares(recomputed=_FINEST - k, offloaded=k) for k in steps
            ]
        for shares in sorted(tried, key=lambda shares: self._climbs.bound(self._climbs.decisions(shares))):
            self._try(shares)
            progress(1 / len(tried))

    def near(self, other: _SharesSearch) -> None:
        """Tries another placement's best shares and their grid neighbours, where they could be shorter."""
        self._hope = other.shortest
        for shares in (other.best, *_around(other.best, _FINEST // _GRID)):
            self._try(shares)

    def refine(self) -> None:
        """Improves the best shares of the grid, from half its spacing down to the finest step."""
        step = _FINEST // _GRID // 2
        while step:
            gained = [self._try(shares) for shares in _around(self.best, step)]
            if not any(gained):
                step //= 2

    def settled(self) -> tuple[Decisions, float]:
        """Best decisions and their makespan, among the best few, by longer climbs with all microbatches."""
        few = sorted(self._tried, key=self._tried.__getitem__)[:_FINALISTS]
        climbed = [(decisions, self._climbs.length(decisions, final=True)) for decisions in few]
        return min(climbed, key=lambda pair: pair[1])

    def _try(self, shares: Shares) -> bool:
        """Returns True if ``shares`` give the shortest climb so far."""
        may = self._request.recompute or not shares.recomputed, self._request.offload or not shares.offloaded
        if not all(may) or min(shares) < 0 or sum(shares) > _FINEST:
            return False
        decisions = self._climbs.decisions(shares)
        if decisions in self._tried or self._climbs.bound(decisions) > min(self.shortest, self._hope) - EPSILON:
            return False
        self._tried[decisions] = length = self._climbs.length(decisions)
        if length > self.shortest - EPSILON:
            return False
        self.best, self.shortest = shares, length
        return True


def _around(shares: Shares, step: int) -> list[Shares]:
    recomputed, offloaded = shares
    moves = [(step, 0), (-step, 0), (0, step), (0, -step), (step, -step), (-step, step)]
    return [Shares(recomputed + more, offloaded + moved) for more, moved in moves]
