"""V schedules: two chunks per rank, stages go up the ranks and back down (arXiv 2405.15362, section 3).

Each schedule is a building block with offsets in slots of one unit. Its interval of 6 slots is the work of one
microbatch on one rank at equal costs. From each rank to the next, an offset moves by a fixed number of slots (a step).
There are four steps: F of chunk 0, F of chunk 1, I of chunk 1, I of chunk 0. They set how long activations are kept,
and so the peak memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from megatron.schedules.planner.named.building_blocks import Block, pulled_together, with_weights
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import v_shape
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.search.polish import polish
from megatron.schedules.utils.progress import Progress, unheard

INTERVAL = 6
Offsets = Callable[[int], tuple[int, int, int, int]]


def v_min(request: Request, progress: Progress = unheard) -> Schedule:
    """V-Min, steps of 1, 1, 1, 1: the least memory, peak ceil((d + 2) / 3) microbatches."""
    return _polished(request, v_min_block(request.ranks), (request.ranks + 4) // 3, progress)


def v_half(request: Request, progress: Progress = unheard) -> Schedule:
    """V-Half, steps of 2, 1, 2, 1: half of 1F1B's memory, peak floor(d / 2) + 1 microbatches."""
    return _polished(request, v_half_block(request.ranks), request.ranks // 2 + 1, progress)


def v_zb(request: Request, progress: Progress = unheard) -> Schedule:
    """V-ZB, steps of 4, 2, 4, 2: 1F1B's memory, d microbatches, and no idle time in the steady state or after it."""
    return _polished(request, v_zb_block(request.ranks), request.ranks, progress)


def one_f_one_b_v(request: Request, progress: Progress = unheard) -> Schedule:
    """1F1B-V, a V with whole backwards: two thirds of 1F1B's memory, peak floor(2 d / 3) + 1 microbatches."""
    block = one_f_one_b_v_block(request.ranks)
    limit = max(block.peak_bound(rank) for rank in range(request.ranks))
    base = pulled_together(block, request.microbatches, int(limit), request.schedule)
    return polish(base, request.costs_on(base.placement), limit, progress)


def _polished(request: Request, block: Block, limit: float, progress: Progress) -> Schedule:
    base = block.repeat(request.microbatches, request.schedule)
    return polish(base, request.costs_on(base.placement), limit, progress)


def v_min_block(d: int) -> Block:
    """Block of V-Min.

    If 3 divides d, the pass after the turn waits two slots, so that passes of a rank do not collide.
    """
    k = 2 if d % 3 == 0 else 0
    return _block(d, lambda i: (i, 2 * d - i - 1, 2 * d + k + i, 4 * d + k - i - 1))


def v_half_block(d: int) -> Block:
    """Block of V-Half.

    If d is even, the pass after the turn waits three slots, so that passes of a rank do not collide.
    """
    k = 3 if d % 2 == 0 else 0
    return _block(d, lambda i: (2 * i, 3 * d - i - 2, 3 * d + k + 2 * i - 1, 6 * d + k - i - 2))


def v_zb_block(d: int) -> Block:
    """Block of V-ZB.

    Steps of 4 and -2 are equal modulo 6, so the four passes use the same slots of the interval on each rank. F of chunk
    0 uses slot 0, F of chunk 1 slot 1, and I of chunk 1 slot 2. I of chunk 0 uses slot 3, or the first later slot that
    its dependency allows.
    """
    turn = _next(4 * (d - 1) + 1, 4 * (d - 1) + 1)
    first_input = turn + 2 * (d - 1) + 1
    back = _next(first_input + 4 * (d - 1) + 1, 4 * (d - 1) + 3)
    return _block(d, lambda i: (4 * i, turn + 2 * (d - 1 - i), first_input + 4 * i, back + 2 * (d - 1 - i)))


def one_f_one_b_v_block(d: int) -> Block:
    """Block of 1F1B-V.

    Whole backwards have two slots. Each pass gets the first free slots that its dependency allows.
    """
    placement, length = v_shape(d), {Kind.F: 1, Kind.B: 2}
    taken: list[set[int]] = [set() for _ in range(d)]
    offset: dict[tuple[int, Kind], int] = {}
    time = 0
    chain = [(s, Kind.F) for s in range(2 * d)] + [(s, Kind.B) for s in reversed(range(2 * d))]
    for stage, kind in chain:
        used = taken[placement.rank_of[stage]]
        time = next(t for t in count(time) if not any((t + i) % INTERVAL in used for i in range(length[kind])))
        used.update((time + i) % INTERVAL for i in range(length[kind]))
        offset[stage, kind] = time
        time += length[kind]
    return Block(placement, INTERVAL, offset, length)


def _next(earliest: int, residue: int) -> int:
    """First slot from ``earliest`` on that equals ``residue`` modulo the interval."""
    return earliest + (residue - earliest) % INTERVAL


def _block(d: int, offsets: Offsets) -> Block:
    placement, offset = v_shape(d), {}
    for rank in range(d):
        up, down = placement.stages_of(rank)
        offset[up, Kind.F], offset[down, Kind.F], offset[down, Kind.I], offset[up, Kind.I] = offsets(rank)
    return with_weights(placement, INTERVAL, offset)
