"""Schedules with one chunk per rank: 1F1B, eager 1F1B, and the zero-bubble schedules ZB-1P and ZB-2P.

1F1B is PipeDream-flush (arXiv 2104.04473). ZB-1P and ZB-2P have the memory of the handcrafted schedules of Zero Bubble
Pipeline Parallelism (arXiv 2401.10241). Their order is searched for the given costs.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.vocabulary_passes import share_output
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.polish import polish
from megatron.schedules.utils.progress import Progress, unheard


def one_f_one_b(request: Request) -> Schedule:
    """1F1B: rank r runs d - 1 - r forwards ahead, then one forward and one whole backward in turn.

    Peak memory is min(n, d). With vocabulary parallelism each rank runs one more forward ahead, while the ranks compute
    their part of the output layer.
    """
    shared = request.costs.shared_vocabulary
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
