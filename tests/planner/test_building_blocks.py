"""Building blocks: how long activations live in them, what that bounds, and that the V blocks are as published."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from megatron.schedules.planner.named.building_blocks import Block, with_weights
from megatron.schedules.planner.named.v_shaped import v_half_block, v_min_block, v_zb_block
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, StageKind
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import timed

F, I, W, B = Kind.F, Kind.I, Kind.W, Kind.B  # noqa: E741
SIZES = range(2, 65)
V_BLOCKS: dict[str, tuple[Callable[[int], Block], Callable[[int], int]]] = {
    "v-min": (v_min_block, lambda d: math.ceil((d + 2) / 3)),
    "v-half": (v_half_block, lambda d: d // 2 + 1),
    "v-zb": (v_zb_block, lambda d: d),
}


def two_ranks(interval: int) -> Block:
    """1F1B on two ranks: a forward takes one slot, a whole backward two."""
    return Block(sequential(2), interval, {(0, F): 0, (1, F): 1, (1, B): 2, (0, B): 4}, {F: 1, B: 2})


def collisions(block: Block) -> list[str]:
    """Pairs of passes of one rank that would run at once when the block repeats; empty for a sound block."""
    found = []
    for rank in range(block.placement.ranks):
        taken: dict[int, StageKind] = {}
        for stage in block.placement.stages_of(rank):
            for kind in sorted(block.kinds):
                for slot in range(block.offset[stage, kind], block.offset[stage, kind] + block.length[kind]):
                    other = taken.setdefault(slot % block.interval, (stage, kind))
                    if other != (stage, kind):
                        found.append(f"rank {rank}: {other[0]}{other[1]} and {stage}{kind}")
    return found


def test_an_activation_lives_from_f_to_the_end_of_the_backward():
    block = two_ranks(3)
    assert (block.lifespan(0), block.lifespan(1)) == (6, 3)
    assert (block.peak_bound(0), block.peak_bound(1)) == (2, 1)
    assert block.kinds == (F, B), "in the order of the table"


def test_with_a_split_backward_an_activation_lives_to_the_end_of_w():
    offset = {(0, F): 0, (0, I): 1, (0, W): 9}
    assert Block(sequential(1), 3, offset, {F: 1, I: 1, W: 1}).lifespan(0) == 10


def test_the_bound_counts_each_chunk_for_its_share():
    """Rank 0 of a V: its first stage lives 8 slots, its second 3; at an interval of 6 that is 2 and 1 halves."""
    offset = {(0, F): 0, (1, F): 1, (2, F): 2, (3, F): 3, (3, B): 4, (2, B): 6, (1, B): 8, (0, B): 10}
    block = Block(v_shape(2), 6, offset, {F: 1, B: 2})
    assert (block.lifespan(0), block.lifespan(3)) == (12, 3)
    assert block.peak_bound(0) == (2 + 1) / 2


def test_a_block_repeats_each_interval():
    schedule = two_ranks(3).repeat(3, "repeated")
    validate(schedule)
    assert [" ".join(map(str, row)) for row in schedule.order] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert peaks(schedule, Costs().on(schedule.placement)) == (2, 1)


def test_passes_that_would_run_at_once_collide():
    assert collisions(two_ranks(3)) == []
    assert collisions(two_ranks(4)) == ["rank 0: 0B and 0F"]
    assert len(collisions(two_ranks(2))) == 2, "either rank has more work than fits in two slots"


# --- each W in a free slot ----------------------------------------------------------------------------------------


def test_w_takes_the_first_free_slot_after_its_i():
    """In an interval of 3 the F of the next microbatch takes the slot right after I; W takes the one after that."""
    block = with_weights(sequential(1), 3, {(0, F): 0, (0, I): 2})
    assert block.offset[0, W] == 4
    assert collisions(block) == []


def test_f_and_i_must_not_collide():
    with pytest.raises(PlanError) as caught:
        with_weights(sequential(2), 6, {(0, F): 0, (0, I): 7, (1, F): 1, (1, I): 7})
    assert str(caught.value) == "the building block collides on rank 1 of 2"


@pytest.mark.timeout(5)
def test_an_interval_shorter_than_the_work_is_refused():
    """Two stages a rank take six slots: in five there is no room for the last W, however long one looks."""
    with pytest.raises(PlanError):
        with_weights(v_shape(1), 5, {(0, F): 0, (1, F): 1, (1, I): 2, (0, I): 3})


# --- the blocks of the V ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", V_BLOCKS)
def test_no_v_block_collides_and_none_idles_in_its_steady_state(name: str):
    for d in SIZES:
        block = V_BLOCKS[name][0](d)
        assert collisions(block) == []
        for rank in range(d):
            slots = [block.offset[s, k] % block.interval for s in block.placement.stages_of(rank) for k in (F, I, W)]
            assert sorted(slots) == list(range(block.interval))


@pytest.mark.parametrize("name", V_BLOCKS)
def test_each_pass_of_a_v_block_follows_what_it_needs(name: str):
    for d in SIZES:
        at, last = V_BLOCKS[name][0](d).offset, 2 * d - 1
        assert all(at[s, F] < at[s + 1, F] and at[s + 1, I] < at[s, I] for s in range(last))
        assert at[last, F] < at[last, I]
        assert all(at[s, I] < at[s, W] <= at[s, I] + 6 for s in range(2 * d)), "a W waits one interval at most"


def _published(d: int, steps: Callable[[int], tuple[int, int, int, int]]) -> dict[tuple[int, Kind], int]:
    found = {}
    for i in range(d):
        up, down = i, 2 * d - 1 - i
        found[up, F], found[down, F], found[down, I], found[up, I] = steps(i)
    return found


@pytest.mark.parametrize("d", SIZES)
def test_v_min_and_v_half_have_the_published_offsets(d: int):
    k = 2 if d % 3 == 0 else 0
    v_min = _published(d, lambda i: (i, 2 * d - i - 1, 2 * d + k + i, 4 * d + k - i - 1))
    k = 3 if d % 2 == 0 else 0
    v_half = _published(d, lambda i: (2 * i, 3 * d - i - 2, 3 * d + k + 2 * i - 1, 6 * d + k - i - 2))
    assert v_min.items() <= v_min_block(d).offset.items()
    assert v_half.items() <= v_half_block(d).offset.items()


@pytest.mark.parametrize("name", V_BLOCKS)
@pytest.mark.parametrize("d", [*range(2, 17), 25, 32, 33])
def test_a_v_block_holds_what_is_published_and_its_bound_allows(name: str, d: int):
    make, published = V_BLOCKS[name]
    block = make(d)
    schedule = block.repeat(2 * d + 3, name)
    validate(schedule)
    held = peaks(schedule, Costs().on(schedule.placement))
    assert max(held) == published(d)
    assert all(own <= block.peak_bound(rank) for rank, own in enumerate(held))
    # Ranks' chunks need not both be at their most at once: by up to half a microbatch the bound may be generous.
    assert max(map(block.peak_bound, range(d))) <= published(d) + 0.5


@pytest.mark.parametrize("name", V_BLOCKS)
@pytest.mark.parametrize("d", [2, 3, 4, 7, 12])
def test_squeezed_no_pass_starts_after_its_slot(name: str, d: int):
    block = V_BLOCKS[name][0](d)
    timeline = timed(block.repeat(d + 2, name))
    for row, starts in zip(timeline.schedule.order, timeline.start, strict=True):
        for work, start in zip(row, starts, strict=True):
            assert start <= block.offset[work.stage, work.kind] + work.microbatch * block.interval
