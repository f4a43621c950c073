"""What is written of a pass can be read back, and every placement is what its name says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape, zigzag
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import examples

NUMBER = st.integers(0, 10**6)
RANKS, CHUNKS = st.integers(1, 64), st.integers(1, 6)


@examples(200)
@given(st.builds(Pass, NUMBER, st.sampled_from(Kind), NUMBER))
def test_a_written_pass_reads_back(work: Pass):
    assert Pass.parse(str(work)) == work
    assert Pass.parse(f"  {work}\n") == work


def test_passes_are_written_as_torch_writes_them():
    assert [str(Pass(*work)) for work in ((2, Kind.F, 0), (5, Kind.I, 3), (0, Kind.W, 12), (10, Kind.B, 1))] == [
        "2F0",
        "5I3",
        "0W12",
        "10B1",
    ]


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2f0", "2X0", "2F0 2B0", "-1F0", "2F-1", "2.0F1", "2F0,", "9" * 5000 + "F0"]
)
def test_what_is_no_pass_is_refused_by_its_form(text: str):
    with pytest.raises(PlanError) as refused:
        Pass.parse(text)
    assert "as in 2F0 or 5I3" in str(refused.value)
    assert "\n" not in str(refused.value)


@examples(200)
@given(st.text("0123FIWB- .x\n", max_size=6))
def test_any_text_is_a_pass_or_is_refused(text: str):
    try:
        work = Pass.parse(text)
    except PlanError:
        return
    assert work.stage >= 0 and work.microbatch >= 0


# --- placements ---------------------------------------------------------------------------------------------------


@examples(150)
@given(RANKS, CHUNKS)
def test_every_rank_holds_equally_many_stages(ranks: int, chunks: int):
    for placement in (interleaved(ranks, chunks), zigzag(ranks, chunks)):
        assert (placement.ranks, placement.chunks, placement.stages) == (ranks, chunks, ranks * chunks)
        assert placement.last_stage == ranks * chunks - 1
        _check_stages(placement)
    assert sequential(ranks).chunks == 1
    _check_stages(sequential(ranks))


def _check_stages(placement: Placement) -> None:
    """Stages and chunks are the two ways to look at one map."""
    found = {}
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        assert len(stages) == placement.chunks and list(stages) == sorted(stages)
        for chunk, stage in enumerate(stages):
            assert placement.chunk_of(stage) == chunk
            found[stage] = rank
    assert [found[stage] for stage in range(placement.stages)] == list(placement.rank_of)


@examples(100)
@given(RANKS, CHUNKS)
def test_interleaved_looped_and_zigzag_turns_on_the_spot(ranks: int, chunks: int):
    assert interleaved(ranks, chunks).rank_of == tuple(stage % ranks for stage in range(ranks * chunks))
    turning = zigzag(ranks, chunks).rank_of
    for stage, (here, there) in enumerate(pairwise(turning)):
        assert abs(there - here) == (0 if (stage + 1) % ranks == 0 else 1)
    assert turning[0] == 0
    if chunks % 2 == 0:
        assert turning[-1] == 0, "embedding and output layer share rank 0"


@given(RANKS)
@examples(64)
def test_a_v_is_a_zigzag_of_two_chunks(ranks: int):
    placement = v_shape(ranks)
    assert placement == zigzag(ranks, 2)
    assert placement.name == "v"
    assert all(placement.stages_of(rank) == (rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def test_a_placement_says_what_it_is():
    assert str(v_shape(4)) == "v (4 ranks x 2 chunks)"
    assert str(zigzag(4, 3)) == "zigzag (4 ranks x 3 chunks)"
    assert str(sequential(2)) == "sequential (2 ranks x 1 chunk)"
