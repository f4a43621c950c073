"""1F1B and schedules made from its order: eager and interleaved 1F1B, and the zero-bubble schedules ZB-1P and ZB-2P.

1F1B is PipeDream-flush (arXiv 2104.04473), interleaved 1F1B is of section 2.2 there. ZB-1P and ZB-2P have the memory of
the handcrafted schedules of Zero Bubble Pipeline Parallelism (arXiv 2401.10241). Their order is searched for the given
costs.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.vocabulary_passes import share_output
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import interleaved, sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.polish import polish
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress, unheard


def one_f_one_b(request: Request) -> Schedule:
    """1F1B: rank r runs d - 1 - r forwards ahead, then one forward and one whole backward in turn.

    Peak memory is min(n, d). With vocabulary parallelism each rank runs one more forward ahead, while the ranks compute
    their part of the output layer.
    """
    shared = request.costs.model.shared_vocabulary
    order = _one_f_one_b(request, ahead=lambda rank: request.ranks - 1 - rank + shared)
    return share_output(order, request.costs_on(order.placement), more=0.0) if shared else order


def eager_1f1b(request: Request) -> Schedule:
    """Eager 1F1B: twice as many forwards ahead, so that messages overlap computing. Peak memory is min(n, 2d - 1)."""
    return _one_f_one_b(request, ahead=lambda rank: 2 * (request.ranks - 1 - rank))


def zb_1p(request: Request, progress: Progress = unheard) -> Schedule:
    """ZB-1P: 1F1B with W as filler. Each rank stays within 1F1B's peak memory, d microbatches."""
    return _zero_bubble(request, request.ranks, progress)


def zb_2p(request: Request, progress: Progress = unheard) -> Schedule:
    """ZB-2P: W as filler within 2d microbatches. At usual costs, ranks idle only until their first forward."""
    return _zero_bubble(request, 2 * request.ranks, progress)


def _one_f_one_b(request: Request, ahead: Callable[[int], int], split: bool = False) -> Schedule:
    n, rows = request.microbatches, []
    for rank in range(request.ranks):
        warm = min(n, ahead(rank))
        row = [Pass(rank, Kind.F, m) for m in range(warm)]
        for m in range(n):
            if warm + m < n:
                row.append(Pass(rank, Kind.F, warm + m))
            row += [Pass(rank, kind, m) for kind in ((Kind.I, Kind.W) if split else (Kind.B,))]
        rows.append(tuple(row))
    return Schedule(request.schedule, sequential(request.ranks), n, tuple(rows))


def _zero_bubble(request: Request, limit: int, progress: Progress) -> Schedule:
    base = _one_f_one_b(request, ahead=lambda rank: request.ranks - 1 - rank, split=True)
    return polish(base, request.costs_on(base.placement), limit, progress)


def interleaved_1f1b(request: Request) -> Schedule:
    """Interleaved 1F1B: microbatches go through one chunk after another in groups of d. The last group may be smaller.

    Rank r runs 2 (d - 1 - r) + (v - 1) d forwards ahead, then one forward and one backward in turn.
    """
    d, n, v = request.ranks, request.microbatches, request.chunks
    if v < 2:
        raise PlanError(
            f"interleaved-1f1b needs at least 2 chunks a rank, not {v}; with 1 chunk ask for 1f1b", "chunks"
        )
    # If d does not divide n: the order for the next multiple, without its first few microbatches. Removing passes from
    # an order adds no deadlock, no time and no memory.
    short = -n % d
    placement, rows = interleaved(d, v), []
    for rank in range(d):
        stages = placement.stages_of(rank)
        forwards, backwards = [], []
        for first in range(-short, n, d):
            group = range(first, first + d)
            forwards += [Pass(stage, Kind.F, m) for stage in stages for m in group]
            backwards += [Pass(stage, Kind.B, m) for stage in reversed(stages) for m in group]
        warm = min((n + short) * v, 2 * (d - 1 - rank) + (v - 1) * d)
        row = forwards[:warm]
        for index, backward in enumerate(backwards):
            row += [*forwards[warm + index : warm + index + 1], backward]
        rows.append(tuple(work for work in row if work.microbatch >= 0))
    return Schedule(request.schedule, placement, n, tuple(rows))
