"""Finds the best schedule within the memory limit of a request, over all placements and named schedules it allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.polish import finished, many_plans
from megatron.schedules.utils.errors import PlanError, ShortMemoryError
from megatron.schedules.utils.progress import Parts, Progress

if TYPE_CHECKING:
    from megatron.schedules.search.problem import Problem

# Assumed passes per second of list scheduling on one rank. With more ranks each pass looks further ahead. The number is
# fixed, so that effort and plan are the same on all machines.
_PASSES_A_SECOND = 16e6
_MOST_SECONDS = 1_000_000  # more than eleven days
# Seconds that a search takes at least, for each rank and microbatch.
_LEAST_SECONDS = 0.003
# Results of a search depend on chance. Two short searches with other seeds are added. Each takes this share of the
# search time, of which at most so many seconds count. Searches of less time, or of fewer rounds for all memory limits
# together, find nothing and are skipped: each climb takes a few rounds at least, and those of a large plan take long.
_SEEDS, _SHARE, _MOST_SHARED, _FEWEST_SECONDS, _FEWEST_ROUNDS = (400, 700), 0.1, 5.0, 0.1, 20
# Chunks per rank if memory is scarce and the request does not say how many.
_FINER_CHUNKS = 8
# Factor on the search time where a plan has more passes than F, I and W: S and T add a third, R, or O and L, as many.
_WITH_MORE_PASSES = 1.5


def placements(request: Request) -> list[Placement]:
    """Placements that the search may use, most promising first: finer chunks pack better.

    Raises:
        PlanError: if no number of chunks is left, or settled layers match none of them.
    """
    if request.placement is not None:
        return [request.placement]
    ranks, found = request.ranks, []
    why = PlanError("adaptive needs a number of chunks a rank to choose from, 1 or more", "chunks")
    for chunks in sorted({chunks for chunks in request.chunk_choices if chunks > 0}, reverse=True):
        placement = zigzag(ranks, chunks) if chunks > 1 else sequential(ranks)
        try:
            request.costs_on(placement)
        except PlanError as error:  # settled layers of other stages
            why = error
        else:
            found.append(placement)
    if not found:
        raise why
    return found


def chunk_choices(most: int) -> tuple[int, ...]:
    """Numbers of chunks per rank up to ``most``: the powers of two, and ``most`` itself."""
    return tuple(sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most}))


def with_finer_chunks[Made](
    chunks: int | None, make: Callable[[int | None], Made], request_of: Callable[[Made], Request]
) -> Made:
    """Makes a request with at most ``chunks`` chunks per rank; without that number, with finer chunks where they help.

    Plans with finer chunks are often shorter if a rank may hold less than one microbatch and recompute or offload is
    allowed. With more memory they make plans no shorter, and the search slower.

    Args:
        chunks: the user's number; None without one.
        make: makes a request with at most so many chunks per rank; None for the default.
        request_of: the planning request in what ``make`` returns.

    Raises:
        PlanError: as ``make`` does.
    """
    made = make(chunks)
    request = request_of(made)
    limit = request.memory_limit
    scarce = limit is not None and limit * request.ranks < 1 - EPSILON
    if chunks is None and scarce and (request.recompute or request.offload):
        with suppress(PlanError):  # too few layers
            return make(_FINER_CHUNKS)
    return made


def least_limit(request: Request) -> float:
    """Smallest possible memory limit, one microbatch at a time, as a fraction of 1F1B's memory."""
    found = []
    for placement in placements(request):
        decided, whole = [request.decisions], (1.0,) * placement.stages
        decided += [replace(request.decisions, recomputed=whole)] if request.recompute else []
        decided += [replace(request.decisions, offloaded=whole)] if request.offload else []
        found += [request.costs.on(placement, each).least(placement) for each in decided]
    return min(found) / request.ranks


def default_seconds(ranks: int, microbatches: int) -> float:
    """Default search time, in seconds on one core.

    It is 8 s for 8 ranks and 32 microbatches, and 70 s for 32 ranks and 128 microbatches.
    """
    return min(max(1.0, 8 * math.pow(ranks * microbatches / 256, 0.78)), 100.0)


def search_seconds(request: Request) -> float:
    """Search time for ``request``, in seconds on one core.

    It is the default if the request gives none, times 1.5 if S and T, R, or O and L must be placed, too.
    """
    usual = default_seconds(request.ranks, request.microbatches)
    more = request.costs.model.shared_vocabulary or bool(request.decisions.mean_savings)
    return request.search_seconds or (_WITH_MORE_PASSES * usual if more else usual)


def expected_seconds(request: Request) -> float:
    """Time that the search for ``request`` is expected to take, in seconds on one core, for its progress.

    It is longer than :func:`search_seconds` for a large plan, of which each climb takes a few rounds at least.
    """
    return max(search_seconds(request), _LEAST_SECONDS * request.ranks * request.microbatches)


def effort(ranks: int, seconds: float) -> float:
    """Number of passes that a search of this many seconds schedules."""
    return seconds * _PASSES_A_SECOND / math.sqrt(ranks)


def bound(request: Request) -> float:
    """Lower bound of the iteration time within the memory limit, in the unit of the costs.

    It holds for every placement that the plan may have.
    """
    limit, placed = limit_in_microbatches(request), placements(request)
    if request.placement is None and any(placement.chunks == request.chunks for placement in placed):
        # The placement of interleaved-1f1b, which may also be chosen.
        placed.append(interleaved(request.ranks, request.chunks))
    return min(lower_bound(placement, request.microbatches, request.costs_on(placement), limit) for placement in placed)


def plan_adaptive(request: Request, named: Callable[[Request], Sequence[Timeline]], progress: Progress) -> Schedule:
    """Returns the shortest schedule found within ``request.memory_limit``.

    Args:
        request: the request to plan, with costs around 1.
        named: plans all named schedules for a request. The result is never longer than one of them that fits.
        progress: receives the progress of the search.

    Raises:
        PlanError: if nothing fits within the limit; the message names the smallest limit that works.
    """
    from megatron.schedules.search.frontier import frontier
    from megatron.schedules.search.problem import Problem

    limit = limit_in_microbatches(request)
    n, seconds = request.microbatches, search_seconds(request)
    problems = [Problem(placement, n, request.costs_on(placement)) for placement in placements(request)]
    with many_plans(math.inf):  # the compiled code is loaded anyway
        every = named(request)
    known = [
        timeline
        for timeline in every
        if timeline.schedule.placement.chunks in request.chunk_choices
        and request.placement in (None, timeline.schedule.placement)
    ]
    saved = any(problem.costs.saved for problem in problems)
    known += _start(request, problems, limit)
    short = _SHARE * min(seconds, _MOST_SHARED)
    searches = [(0, seconds)]
    rounds = effort(request.ranks, short) / sum(problem.effort for problem in problems)
    if short >= _FEWEST_SECONDS and rounds >= _FEWEST_ROUNDS and not saved:
        searches += [(seed, short) for seed in _SEEDS]
    parts, best = Parts(progress, sum(each for _, each in searches)), None
    for seed, each in searches:
        budget = effort(request.ranks, each)
        found = frontier(problems, known, limit, budget, parts.begin(each), alone=saved, seed=seed)[-1].best
        if best is None or found.makespan < best.makespan - EPSILON:
            best = found
    parts.end()
    assert best is not None
    return best.schedule


def _start(request: Request, problems: Sequence[Problem], limit: float) -> list[Timeline]:
    """Schedule that the request says to start from, if it fits within ``limit`` microbatches on an average rank."""
    start = request.start
    for problem in problems:
        if start is not None and start.placement == problem.placement:
            order = problem.order(start)
            split = replace(start, order=problem.rows(order))
            return [simulate(finished(split, problem.costs), problem.costs)] if problem.fits(order, limit) else []
    return []


def limit_in_microbatches(request: Request) -> float:
    """Activation memory limit of a rank, in microbatches.

    Raises:
        PlanError: if there is no limit, or the search time is not valid.
        ShortMemoryError: the limit is below the smallest that works.
    """
    asked, least = request.memory_limit, least_limit(request)
    if asked is None:
        raise PlanError(
            "adaptive needs a memory limit: a fraction of 1F1B's activation memory, such as 0.5", "memory_limit"
        )
    if not asked >= least - EPSILON:
        # Rounded up, so that the limit in the message works.
        raise ShortMemoryError(
            f"a memory limit of {asked:g} of 1F1B's is too small for {request.ranks} ranks: "
            f"{math.ceil(least * 1e4) / 1e4:g} is the smallest that works",
            "memory_limit",
        )
    seconds = request.search_seconds
    if seconds is not None and not 0 < seconds < math.inf:
        raise PlanError(f"the search needs a positive number of seconds, not {seconds:g}", "search_seconds")
    if seconds is not None and seconds > _MOST_SECONDS:
        raise PlanError(f"a search may take {_MOST_SECONDS:,} seconds, not {seconds:g}", "search_seconds")
    return max(asked, least) * request.ranks
