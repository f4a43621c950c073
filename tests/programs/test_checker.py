"""The checker: sound programs pass, each way of being unsound is named."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Action, Op, Program, ProgramError
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape
from tests.programs.messages import messages
from tests.programs.random_schedules import random_schedule

_FORM = re.compile(r"(\d+)([A-Z_]+)(\d+)")


def programs(placement: Placement, n: int, *rows: str) -> list[Program]:
    """Programs written as one line of actions for each rank; peers follow from the placement."""
    found = []
    for rank, row in enumerate(rows):
        actions = []
        for text in row.split():
            match = _FORM.fullmatch(text)
            assert match is not None, text
            op, stage = Kind(match[2]) if match[2] in KINDS else Op(match[2]), int(match[1])
            step = {Op.SEND_F: 1, Op.RECV_B: 1, Op.SEND_B: -1, Op.RECV_F: -1}.get(op)
            peer = None if step is None else placement.rank_of[stage + step]
            actions.append(Action(op, stage, int(match[3]), peer))
        found.append(Program(rank, tuple(actions), placement, n))
    return found


def refused(placement: Placement, n: int, *rows: str) -> str:
    with pytest.raises(ProgramError) as caught:
        check(programs(placement, n, *rows))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_sound_programs_pass():
    sound = programs(
        sequential(2),
        2,
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0REDUCE1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1REDUCE1 1SEND_B1",
    )
    check(sound)
    assert messages(sound) == {(0, 1): 2, (1, 0): 2}


def test_both_ends_must_mean_the_same_message():
    message = refused(sequential(2), 2, "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    assert message == "message 0 on channel 0->1 is 0SEND_F0, but rank 1 posts 1RECV_F1"


def test_the_two_streams_of_a_v_must_not_be_swapped():
    """An activation and a gradient of equal shape go the same way: nothing but order tells them apart."""
    message = refused(
        v_shape(2),
        2,
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0F1 0SEND_F1 3RECV_F1 0RECV_B0 3F1 3W0 0B0 3B1 3SEND_B1 0RECV_B1 0B1",
        "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 2RECV_B0 1F1 2F1 2SEND_F1 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 1SEND_B1",
    )
    assert message == "message 1 on channel 0->1 is 3SEND_B0, but rank 1 posts 1RECV_F1"


def test_every_send_needs_its_receive_and_the_other_way_round():
    message = refused(sequential(2), 2, "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0")
    assert message == "channel 0->1 has 2 sends and 1 receives: 0SEND_F1 is never received"
    message = refused(sequential(2), 2, "0F0 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1")
    assert message == "channel 0->1 has 1 sends and 2 receives: 1RECV_F1 is never sent"


def test_ranks_that_wait_for_each_other():
    message = refused(interleaved(2, 2), 1, "2RECV_F0 2F0 2SEND_F0 0F0 0SEND_F0", "1RECV_F0 3RECV_F0 1F0 1SEND_F0 3F0")
    assert message == ("message 0 on channel 0->1 is 2SEND_F0, but rank 1 posts 1RECV_F0")
    message = refused(interleaved(2, 2), 2, "2RECV_F0 2F0 0F0 0SEND_F0 2SEND_F0", "1RECV_F0 3RECV_F0 1F0 1SEND_F0 3F0")
    assert message == (
        "ranks wait for each other: rank 0 before 2F0 for message 0 of channel 1->0; "
        "rank 1 before 3RECV_F0 for message 0 of channel 0->1"
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1F0", "rank 0: 1F0: stage 1 is not on this rank"),
        ("0F0", "rank 0: stage 1's input of microbatch 0 is never used"),
        ("0SEND_F0", "rank 0: 0SEND_F0 needs stage 1's input of microbatch 0, which is not there"),
        (
            "0F0 0SEND_F0 0B0",
            "rank 0: 0B0 needs stage 0's output's gradient of microbatch 0, which is not there",
        ),
        ("0F0 0F0", "rank 0: 0F0 gives stage 1's input of microbatch 0, which is already there"),
        ("0F0 0SEND_F0 0RECV_B0", "rank 0: stage 0's output's gradient of microbatch 0 is never used"),
    ],
)
def test_each_rank_must_have_what_it_uses_and_use_what_it_has(row: str, expected: str):
    assert refused(sequential(2), 1, row, "1RECV_F0 1F0 1B0 1SEND_B0") == expected


def test_a_peer_must_hold_the_stage_at_the_other_end():
    placement = sequential(3)
    wrong = Program(0, (Action(Kind.F, 0, 0), Action(Op.SEND_F, 0, 0, 2)), placement, 1)
    with pytest.raises(ProgramError, match="0SEND_F0 to or from rank 2, where stage 1 is not"):
        check([wrong, Program(1, (), placement, 1), Program(2, (), placement, 1)])
    with pytest.raises(ProgramError, match="the program of rank 0 was given for rank 1"):
        check([Program(0, (), placement, 1), wrong])


def test_a_rank_waits_for_all_it_has_posted_before_whatever_it_does():
    """Nothing is wrong with these two but that each posts a receive before what the other sends for it."""
    placement = interleaved(2, 2)
    message = refused(
        placement,
        1,
        "2RECV_F0 0F0 0SEND_F0 2F0 2SEND_F0",
        "1RECV_F0 3RECV_F0 1F0 1SEND_F0 3F0",
    )
    assert message == (
        "ranks wait for each other: rank 0 before 0F0 for message 0 of channel 1->0; "
        "rank 1 before 3RECV_F0 for message 0 of channel 0->1"
    )
    check(
        programs(
            placement,
            1,
            "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0",
            "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0",
        )
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0F1 0B0 0REDUCE0 0B1", "rank 0: 0B1 comes after 0REDUCE0, which has reduced its gradients"),
        ("0F0 0F1 0B0 0I1 0REDUCE1 0W1", "rank 0: 0W1 comes after 0REDUCE1, which has reduced its gradients"),
        ("0F0 0F1 0B0 0B1 0REDUCE1 0REDUCE1", "rank 0: 0REDUCE1 comes after 0REDUCE1, which has reduced its gradients"),
    ],
    ids=["whole", "split", "twice"],
)
def test_gradients_are_complete_when_their_reduction_starts(row: str, expected: str):
    assert refused(sequential(1), 2, row) == expected


def test_any_lowered_schedule_passes_and_any_swap_of_its_receives_does_not():
    swapped = 0
    for seed in range(60):
        sound = list(lower(random_schedule(seed, recompute=True)))
        check(sound)
        for rank, program in enumerate(sound):
            receives = [i for i, a in enumerate(program.actions) if a.op in (Op.RECV_F, Op.RECV_B)]
            pairs = [(i, j) for i, j in pairwise(receives) if program.actions[i].peer == program.actions[j].peer]
            for i, j in pairs[:2]:
                actions = list(program.actions)
                actions[i], actions[j] = actions[j], actions[i]
                broken = list(sound)
                broken[rank] = Program(rank, tuple(actions), program.placement, program.microbatches)
                with pytest.raises(ProgramError):
                    check(broken)
                swapped += 1
    assert swapped > 50
