"""The table of a verification says what differs and where, and only differences beyond the kernels' own are wrong."""

from __future__ import annotations

import math

from megatron.schedules.report.verification import Difference, RankResult, lines, passed

RIGHT = RankResult(0, 10, 0, 16, (), None, (), 3 << 20, (1.25, 0.5))


def table(*ranks: RankResult, splits: bool = True) -> str:
    return "\n".join(lines(ranks, "v-half", 2.0 * (1 << 20), splits=splits))


def test_equal_gradients_are_right():
    both = RIGHT, RIGHT._replace(rank=1, peak=1 << 20)
    assert passed(both)
    assert table(*both).splitlines() == [
        "first iteration as v-half, and again with each I and W as one whole backward (B)",
        "gradients     20 parameters on 2 ranks: all equal to the bit",
        "loss          16 values: all equal to the bit",
        "peak memory   3.00 MiB of activations on rank 0, planned 2.00 MiB on the worst rank",
        "seconds       1.25 (with all that a first iteration prepares), again 0.50",
        "result        right: the schedule changes no gradient (exit status 0)",
    ]
    assert "splits no backward" in table(RIGHT, splits=False)


def test_a_difference_is_named_with_its_parameter_and_rank():
    wrong = RIGHT._replace(
        rank=1, gradients=[Difference("small of stage 1", 1e-3), Difference("weight of stage 2", 0.25)]
    )
    assert not passed([RIGHT, wrong])
    said = table(RIGHT, wrong)
    assert "20 parameters on 2 ranks: 2 not equal to the bit\n" in said
    assert said.index("weight of stage 2 on rank 1 differs by 2.5e-01") < said.index("small of stage 1 on rank 1")
    assert "WRONG: report it with these lines (CONTRIBUTING.md) (exit status 1)" in said


def test_kernels_that_are_not_deterministic_are_no_fault_and_hide_no_large_one():
    noisy = [Difference(f"{n} of stage 0", 2e-3, 1e-3) for n in range(9)] + [Difference("gate of stage 0", 2e-3, 1e-9)]
    assert passed([RIGHT._replace(gradients=noisy)])
    assert "--deterministic-mode" in table(RIGHT._replace(gradients=noisy))
    assert "the reference from itself by 1.0e-03" in table(RIGHT._replace(gradients=noisy))
    left_out = RIGHT._replace(gradients=[*noisy, Difference("weight of stage 0", 0.2, 1e-3)])
    assert not passed([left_out]) and "WRONG: report it" in table(left_out)


def test_a_job_that_does_not_repeat_itself_is_not_called_right():
    wild = RIGHT._replace(gradients=[Difference(f"{n} of stage 0", 0.5, 0.3) for n in range(9)])
    assert not passed([wild]) and "WRONG: the reference does not repeat itself" in table(wild)


def test_another_order_of_sums_in_a_job_that_repeats_itself_is_wrong():
    other = RIGHT._replace(gradients=[Difference("weight of stage 0", 3e-8)])
    assert not passed([other]) and "WRONG: the last digits differ" in table(other)


def test_a_hook_that_fires_more_often_is_wrong():
    twice = RIGHT._replace(fired=[("weight of stage 0", 16, 8)])
    assert not passed([twice])
    assert "weight of stage 0 on rank 0: hooks fired 16 times instead of 8" in table(twice)


def test_another_loss_is_wrong_and_says_what_to_look_for():
    other = RIGHT._replace(loss=Difference("loss", 0.1), gradients=[Difference("weight", math.inf)])
    assert not passed([other]) and "elsewhere than the data iterator" in table(other)


def test_no_gradient_at_all_proves_nothing():
    none = RIGHT._replace(parameters=0)
    assert not passed([none]) and "WRONG: no parameter has a gradient" in table(none)
    assert "3 of them are not finite in both runs" in table(RIGHT._replace(infinite=3))
    lost = RIGHT._replace(gradients=[Difference("weight", math.nan)])
    assert not passed([lost])


def test_a_gradient_in_two_parts_may_differ_by_the_order_of_a_sum_and_fire_hooks_twice():
    name = "weight of stage 2"
    shared = RIGHT._replace(gradients=[Difference(name, 1e-7)], fired=[(name, 8, 4)])
    assert not passed([shared])
    assert passed([shared._replace(in_parts=[name])])
    assert "in two parts  1 gradient, because not only their linears use the weights" in table(
        shared._replace(in_parts=[name])
    )
    for wrong in ({"gradients": [Difference(name, 1e-2)]}, {"fired": [(name, 9, 4)]}):
        assert not passed([shared._replace(in_parts=[name], **wrong)])
