"""Pulling a block's warm-up together costs no time and keeps to the microbatches it was allowed ahead."""

from __future__ import annotations

import pytest

from megatron.schedules.planner.named.building_blocks import pulled_together
from megatron.schedules.planner.named.v_shaped import one_f_one_b_v_block
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.validation import validate


@pytest.mark.parametrize("d", [2, 3, 4, 5, 8, 13, 24])
def test_it_is_no_slower_than_the_plain_repeat_within_the_same_memory(d: int):
    block, gained = one_f_one_b_v_block(d), 0.0
    limit = int(max(block.peak_bound(rank) for rank in range(d)))
    costs = Costs().on(block.placement)
    for n in (1, 2, d, 2 * d + 1):
        pulled = pulled_together(block, n, limit, "pulled")
        validate(pulled)
        timeline, plain = simulate(pulled, costs), simulate(block.repeat(n, "plain"), costs)
        assert timeline.makespan <= plain.makespan
        assert timeline.peak <= limit
        gained += plain.makespan - timeline.makespan
    assert gained > 0 or d == 2  # with two ranks there is nothing to wait for


@pytest.mark.parametrize("d", [2, 3, 4, 5, 8, 13, 24])
def test_the_last_rank_waits_for_its_first_backward_as_if_there_were_one_microbatch(d: int):
    """2 d forwards up and down the V, then the d - 1 whole backwards of the other ranks' second chunk."""
    block = one_f_one_b_v_block(d)
    limit = int(max(block.peak_bound(rank) for rank in range(d)))
    pulled = pulled_together(block, 2 * d, limit, "pulled")
    timeline = simulate(pulled, Costs().on(block.placement))
    first = min(
        start for work, start in zip(pulled.order[d - 1], timeline.start[d - 1], strict=True) if work.kind is Kind.B
    )
    assert first == 2 * d + 2 * (d - 1)
