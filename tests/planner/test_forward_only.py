"""Forward passes alone: all of them once, in an order that finishes, oldest first, and as short as can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.planner.forward_only import forward_only
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape, zigzag
from megatron.schedules.schedule.schedule import Rows
from tests.planner.made_schedules import examples, timed
from tests.planner.slow_oracle import slow_spans
from tests.programs.random_schedules import shared_costs

PLACEMENTS = st.one_of(
    st.integers(1, 6).map(sequential),
    st.builds(interleaved, st.integers(1, 5), st.integers(2, 3)),
    st.builds(zigzag, st.integers(1, 5), st.integers(2, 4)),
)


@examples(100)
@given(PLACEMENTS, st.integers(1, 12), st.sampled_from((0.0, 0.05, 1.0, 8.0)))
def test_every_forward_is_done_once_where_its_stage_is(placement: Placement, microbatches: int, latency: float):
    costs = Costs(link=Link(latency))
    schedule = forward_only(placement, microbatches, costs)
    assert (schedule.placement, schedule.microbatches) == (placement, microbatches)
    for rank, row in enumerate(schedule.order):
        assert sorted(row) == [Pass(s, Kind.F, m) for s in placement.stages_of(rank) for m in range(microbatches)]
    spans = slow_spans(schedule, costs)
    assert spans is not None, "no rank waits for one that waits for it"
    assert timed(schedule, costs).makespan == pytest.approx(max(end for _, end in spans.values()))


@examples(60)
@given(PLACEMENTS, st.integers(1, 8), st.sampled_from((0, 1, 3)), st.integers(1, 3))
def test_each_rank_does_the_oldest_microbatch_that_is_ready(
    placement: Placement, microbatches: int, latency: int, forward: int
):
    """Against a ticking clock: each tick a free rank takes the oldest that has come in, of two the earlier stage."""
    # Costs are of half a rank's layers: a whole number of ticks for each stage.
    costs = Costs(LayerTimes(forward * placement.chunks / 2), link=Link(latency))
    assert forward_only(placement, microbatches, costs).order == _ticked(placement, microbatches, forward, latency)


def _ticked(placement: Placement, microbatches: int, length: int, latency: int) -> Rows:
    come_in = {Pass(0, Kind.F, m): 0 for m in range(microbatches)}
    rows: list[list[Pass]] = [[] for _ in range(placement.ranks)]
    busy_until = [0] * placement.ranks
    now = 0
    while any(len(row) < placement.chunks * microbatches for row in rows):
        for rank, row in enumerate(rows):
            here = [p for p, at in come_in.items() if at <= now and placement.rank_of[p.stage] == rank]
            if busy_until[rank] <= now and here:
                work = min(here, key=lambda p: (p.microbatch, p.stage))
                del come_in[work]
                row.append(work)
                busy_until[rank] = now + length
                if work.stage < placement.last_stage:
                    apart = placement.rank_of[work.stage + 1] != rank
                    come_in[work._replace(stage=work.stage + 1)] = now + length + (latency if apart else 0)
        now += 1
    return tuple(map(tuple, rows))


@examples(40)
@given(PLACEMENTS, st.integers(1, 9))
def test_each_rank_does_its_part_of_a_shared_output_layer(placement: Placement, microbatches: int):
    """Of each microbatch once, after the last stage's forward; the older microbatch goes first."""
    schedule = forward_only(placement, microbatches, shared_costs(placement.stages))
    end = {}
    timeline = timed(schedule, shared_costs(placement.stages))
    for row, ends in zip(schedule.order, timeline.end, strict=True):
        end |= dict(zip(row, ends, strict=True))
    for rank, row in enumerate(schedule.order):
        *_, last = placement.stages_of(rank)
        parts = [Pass(last, Kind.S, m) for m in range(microbatches)]
        assert sorted(work for work in row if work.kind is Kind.S) == parts
        for part in parts:
            assert end[Pass(placement.last_stage, Kind.F, part.microbatch)] < end[part]
    assert [work for work in schedule.order[placement.rank_of[-1]] if work.kind is Kind.S] == [
        Pass(placement.last_stage, Kind.S, m) for m in range(microbatches)
    ]


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_nothing_idles_but_the_way_in_and_out(d: int):
    """The bound of the rank farthest from both ends is met: with interleaved stages for whole groups of d."""
    for n in (1, 2, d, 3 * d + 1):
        for placement in (sequential(d), v_shape(d)):
            assert timed(forward_only(placement, n, Costs())).makespan == 2 * n + 2 * (d - 1)
    for groups in (1, 2, 5):
        placement = interleaved(d, 2)
        assert timed(forward_only(placement, groups * d, Costs())).makespan == 2 * groups * d + d - 1
