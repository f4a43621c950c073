"""From a request to the best schedule under its memory limit: which placements and named schedules the search knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.search.reorder import many_plans
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Parts, Progress

# Passes that a second of list scheduling is reckoned to place with one rank; the more ranks, the further each looks.
# Real machines differ; a fixed number makes the effort, and so the plan, the same on all of them.
_PASSES_A_SECOND = 16e6
_MOST_SECONDS = 1_000_000  # more than eleven days
# How far a search gets is luck in part. Two short ones with other seeds go with it, each of this share of its time, of
# that of so many seconds at most; shorter ones find nothing.
_SEEDS, _SHARE, _MOST_SHARED, _FEWEST_SECONDS = (400, 700), 0.1, 5.0, 0.1
# Stages that a rank may hold where memory is scarce and nobody says how many.
FINER_CHUNKS = 8
# Of the usual time where all ranks share the vocabulary: a third more passes, of two sorts more.
_WITH_VOCABULARY = 1.5


def placements(request: Request) -> list[Placement]:
    """Where the search may put the stages, the likeliest first: finer chunks pack better.

    Raises:
        PlanError: where no number of chunks is left, or the costs given for single stages go with none.
    """
    if request.placement is not None:
        return [request.placement]
    ranks, found = request.ranks, []
    why = PlanError("adaptive needs a number of chunks a rank to choose from, 1 or more", "chunks")
    for chunks in sorted({chunks for chunks in request.chunk_choices if chunks > 0}, reverse=True):
        placement = zigzag(ranks, chunks) if chunks > 1 else sequential(ranks)
        try:
            request.costs_on(placement)
        except PlanError as error:  # fewer slices than stages
            why = error
        else:
            found.append(placement)
    if not found:
        raise why
    return found


def chunk_choices(most: int) -> tuple[int, ...]:
    """How many stages a rank may hold where any layers fit: powers of two up to ``most``, and ``most`` itself."""
    return tuple(sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most}))


def wants_finer_chunks(request: Request) -> bool:
    """Whether plans with :data:`FINER_CHUNKS` a rank are often shorter: a rank may hold less than one microbatch.

    It takes recompute or offload. With more memory so many chunks make plans no shorter, and the search slower.
    """
    limit = request.memory_limit
    return (request.recompute or request.offload) and limit is not None and limit * request.ranks < 1 - EPSILON


def least_limit(request: Request) -> float:
    """The smallest memory limit that works: one microbatch at a time, as a fraction of 1F1B's memory."""
    found = []
    for placement in placements(request):
        decided, whole = [request.decisions], (1.0,) * placement.stages
        decided += [replace(request.decisions, recomputed=whole)] if request.recompute else []
        decided += [replace(request.decisions, offloaded=whole)] if request.offload else []
        found += [request.costs.on(placement, each).least(placement) for each in decided]
    return min(found) / request.ranks


def default_seconds(ranks: int, microbatches: int) -> float:
    """How long to search where nobody says, on one core: 8 s for 8 ranks and 32 microbatches, 70 s for 32 and 128."""
    return min(max(1.0, 8 * math.pow(ranks * microbatches / 256, 0.78)), 100.0)


def search_seconds(request: Request) -> float:
    """How long to search for ``request``: as it says, else the default, longer where S and T are to be placed too."""
    usual = default_seconds(request.ranks, request.microbatches)
    return request.search_seconds or (_WITH_VOCABULARY * usual if request.costs.shared_vocabulary else usual)


def effort(ranks: int, seconds: float) -> float:
    """How many passes are scheduled in so many seconds."""
    return seconds * _PASSES_A_SECOND / math.sqrt(ranks)


def bound(request: Request) -> float:
    """No schedule within the request's memory ends before this on any placement the plan may have."""
    limit, placed = limit_in_microbatches(request), placements(request)
    if request.placement is None and any(placement.chunks == request.chunks for placement in placed):
        # That of interleaved-1f1b, which may be the answer too.
        placed.append(interleaved(request.ranks, request.chunks))
    return min(lower_bound(placement, request.microbatches, request.costs_on(placement), limit) for placement in placed)


def plan_adaptive(request: Request, named: Callable[[Request], Sequence[Timeline]], progress: Progress) -> Schedule:
    """The shortest schedule found within ``request.memory_limit``.

    Args:
        named: plans every schedule by name for a request, with times; the result never loses to one that fits.
        progress: hears how far the search is.

    Raises:
        PlanError: where nothing fits under the limit; it says the smallest that works.
    """
    from megatron.schedules.search.frontier import frontier
    from megatron.schedules.search.problem import Problem

    limit = limit_in_microbatches(request)
    asked, seconds = request.around_one(), search_seconds(request)
    problems = [Problem(placement, asked.microbatches, asked.costs_on(placement)) for placement in placements(asked)]
    with many_plans(math.inf):  # machine code is there anyway
        every = named(asked)
    known = [
        timeline
        for timeline in every
        if timeline.schedule.placement.chunks in request.chunk_choices
        and request.placement in (None, timeline.schedule.placement)
    ]
    saved = any(problem.costs.saved for problem in problems)
    short = _SHARE * min(seconds, _MOST_SHARED)
    searches = [(0, seconds)]
    if short >= _FEWEST_SECONDS and not saved:
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


def limit_in_microbatches(request: Request) -> float:
    """What a rank may hold.

    Raises:
        PlanError: where the request cannot be searched for: no limit, one below the smallest that works, no time.
    """
    asked, least = request.memory_limit, least_limit(request)
    if asked is None:
        raise PlanError(
            "adaptive needs a memory limit: a fraction of 1F1B's activation memory, such as 0.5", "memory_limit"
        )
    if not asked >= least - EPSILON:
        # Rounded up, so that what is named works.
        raise PlanError(
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
