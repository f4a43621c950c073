"""1F1B, its eager form, and the zero-bubble schedules ZB-1P and ZB-2P: one chunk a rank.

1F1B is PipeDream-flush (arXiv 2104.04473); ZB-1P and ZB-2P are the handcrafted schedules' memory points of Zero Bubble
Pipeline Parallelism (arXiv 2401.10241), ordered here under the costs given.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.schedules.planner.request import Request
from megatron.schedules.planner.vocabulary_passes import share_output
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.polish import polish
from megatron.schedules.utils.progress import Progress, unheard


def one_f_one_b(request: Request) -> Schedule:
    """Rank r runs d - 1 - r forwards ahead, then one forward and one whole backward in turn: peak min(n, d).

    Where all ranks share the output layer it runs one more ahead, behind which the ranks do their parts of it.
    """
    shared = request.costs.shared_vocabulary
    order = _one_f_one_b(request, ahead=lambda rank: request.ranks - 1 - rank + shared)
    return share_output(order, request.around_one().costs_on(order.placement), more=0.0) if shared else order


def eager_1f1b(request: Request) -> Schedule:
    """1F1B with twice as many forwards ahead, so that messages overlap computing: peak min(n, 2d - 1)."""
    return _one_f_one_b(request, ahead=lambda rank: 2 * (request.ranks - 1 - rank))


def zb_1p(request: Request, progress: Progress = unheard) -> Schedule:
    """1F1B with W as filler, every rank within 1F1B's worst memory, d microbatches."""
    return _zero_bubble(request, request.ranks, progress)


def zb_2p(request: Request, progress: Progress = unheard) -> Schedule:
    """W as filler within 2d microbatches: no idle time but the first forward's way in, at any usual costs."""
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
    return polish(base, request.around_one().costs_on(base.placement), limit, progress)
