"""Every named schedule, for every pipeline of 2 to 64 ranks: the microbatches asked for, within the memory promised."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from tests.planner.made_schedules import NAMED, REAL, UNIT, planned
from tests.planner.promises import promised_memory
from tests.tiers import some_by_night

ORDERED_ONLY = ("1f1b", "eager-1f1b", "interleaved-1f1b")  # stated rather than searched for: any size is cheap


def sizes(name: str, d: int) -> set[int]:
    """Numbers of microbatches around what matters to d; where a search has to run, few of them, another few each d."""
    around = [1, 2, d - 1, d, d + 1, 2 * d + 3]
    if d <= 8:
        chosen = around
    elif name in ORDERED_ONLY:
        chosen = around if d <= 24 else [(d % 5 + 1) * d // 4]
    elif d <= 24:
        chosen = [around[d % 6]]
    else:  # of the longest a third each, so that every length has its turn with some schedule
        chosen = [1 + d % 4] if d % 3 == NAMED.index(name) % 3 or d == 64 else []
    return {n for n in chosen if n > 0}


def check_passes(schedule: Schedule, d: int, n: int) -> None:
    """Counted without the planner's own validation: each stage does each microbatch once, forward and backward."""
    assert (schedule.ranks, schedule.microbatches, len(schedule.order)) == (d, n, d)
    done: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in Kind}
    for _, (stage, kind, m) in schedule.passes():
        done[kind].append((stage, m))
    every = set(product(range(schedule.placement.stages), range(n)))
    backward = done[Kind.I] + done[Kind.B]
    assert set(done[Kind.F]) == set(backward) == every
    assert len(done[Kind.F]) == len(backward) == len(every)
    assert sorted(done[Kind.I]) == sorted(done[Kind.W])


@pytest.mark.parametrize(
    ("name", "d"),
    some_by_night(((name, d) for name in NAMED for d in range(2, 65) if sizes(name, d)), lambda name, d: 8 < d != 16),
)
def test_any_number_of_microbatches_is_planned_within_the_memory_promised(name: str, d: int):
    for n in sizes(name, d):
        timeline = planned(name, d, n)
        check_passes(timeline.schedule, d, n)
        assert timeline.peak <= promised_memory(name, d, n)
        if name in ("1f1b", "eager-1f1b"):
            assert timeline.peak == promised_memory(name, d, n)


@pytest.mark.parametrize("name", [name for name in NAMED if name != "zb-2p"])  # which needs less at unit costs
@pytest.mark.parametrize("d", [2, 3, 4, 6, 8, 13])
def test_with_many_microbatches_just_the_memory_promised_is_used(name: str, d: int):
    """What is left unused would be a smaller bubble forgone, or a promise that says too much."""
    assert planned(name, d, 4 * d).peak == promised_memory(name, d)


@pytest.mark.parametrize("costs", [REAL, "1,1.2,0.4,0.05", "1,3,0.2,2", "3,1,1,0"])
@pytest.mark.parametrize("name", NAMED)
def test_the_memory_promised_is_kept_whatever_passes_take(name: str, costs: str):
    for d, n in ((2, 5), (4, 8), (6, 9), (9, 20)):
        timeline = planned(name, d, n, costs)
        check_passes(timeline.schedule, d, n)
        assert timeline.peak <= promised_memory(name, d, n)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("d", [2, 3, 4, 5, 8])
def test_interleaved_holds_what_it_runs_ahead(d: int, chunks: int):
    """Rank r runs 2 (d - 1 - r) + (v - 1) d forwards of a chunk ahead, and one more before its first backward."""
    for n in (1, d - 1, d, d + 1, 2 * d, 2 * d + d // 2, 3 * d + d - 1):
        timeline = planned("interleaved-1f1b", d, n, UNIT, chunks)
        check_passes(timeline.schedule, d, n)
        for rank, peak in enumerate(timeline.peaks):
            ahead = min(n * chunks, 2 * (d - 1 - rank) + (chunks - 1) * d + 1) / chunks
            assert peak == pytest.approx(ahead) if n % d == 0 else peak <= ahead + 1e-9


@pytest.mark.nightly
def test_hundreds_of_microbatches_are_planned_too():
    for name in NAMED:
        check_passes(planned(name, 2, 400).schedule, 2, 400)


def test_whole_backwards_stay_whole_where_that_is_the_point():
    """Schedules without a split spare the runtime its price: no pass of theirs is an I or a W."""
    for name in (*ORDERED_ONLY, "1f1b-v"):
        kinds = {work.kind for _, work in planned(name, 4, 9).schedule.passes()}
        assert kinds == {Kind.F, Kind.B}
