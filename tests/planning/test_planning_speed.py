"""Plans of usual size take a second or two, and time grows with the passes alone."""

from __future__ import annotations

import pytest

from tests.planning.made_schedules import NAMED, UNIT, plan_and_seconds

anew = plan_and_seconds.__wrapped__


def seconds(name: str, ranks: int, microbatches: int, most: float) -> float:
    """What planning takes; measured once more where that is above ``most``, for machines have their moments."""
    first = plan_and_seconds(name, ranks, microbatches, UNIT, 2)[1]
    return first if first < most else anew(name, ranks, microbatches, UNIT, 2)[1]


@pytest.mark.parametrize("name", NAMED)
def test_32_ranks_and_128_microbatches_take_less_than_two_seconds(name: str):
    assert seconds(name, 32, 128, most=2) < 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-1p", "v-half"])
def test_four_times_the_microbatches_take_about_four_times_as_long(name: str):
    """Up to twice that is put down to the machine; growing with the square it would be four times."""
    few = min(anew(name, 8, 128, UNIT, 2)[1] for _ in range(3))
    assert seconds(name, 8, 512, most=2 * 4 * few) < 2 * 4 * few
