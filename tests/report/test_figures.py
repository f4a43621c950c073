"""The numbers a plan is judged by, and how they are written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.report.figures import above_itself, figures, microbatches, number, ticks, title
from megatron.schedules.utils.printable import counted, percent
from tests.report.made import timeline


def test_figures_of_1f1b_are_the_formulas():
    found = figures(timeline("1f1b", 4, 8))
    assert found.makespan == 66
    assert found.bubble == pytest.approx(3 / 11)
    assert found.peaks == (4, 3, 2, 1)
    assert (found.peak, found.worst, found.share, found.chunks) == (4, 0, 1, 1)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_share_is_of_what_1f1b_holds_with_as_many_microbatches_as_ranks(n):
    """However few there are: a memory limit is of as much."""
    base = figures(timeline("1f1b", 4, n))
    assert base.share == min(n, 4) / 4
    found = figures(timeline("v-half", 4, n))
    assert found.share == found.peak / 4


def test_no_idle_time_is_not_minus_zero():
    # 0.1 + 0.2 is not 0.3: a fully busy span comes out as -1e-16.
    found = figures(timeline("v-zb", 2, 40, "0.1,0.1,0.1,0"))
    assert not percent(found.span_bubble).startswith("-")


@pytest.mark.parametrize(
    ("name", "heading"),
    [("1f1b", "1F1B"), ("v-half", "V-Half"), ("zb-1p", "ZB-1P"), ("1f1b-v", "1F1B-V"), ("file", "File")],
)
def test_headings(name, heading):
    assert title(name) == heading


def test_numbers_carry_no_needless_digits():
    assert [number(x) for x in (3.0, 2.5, 4 / 3, 1200.0, 0.05)] == ["3", "2.5", "1.333", "1200", "0.05"]
    assert percent(0.09433) == "9.43 %"
    assert percent(0.75, 1) == "75.0 %"
    assert counted(1, "microbatch") == "1 microbatch"
    assert counted(4, "pipeline rank") == "4 pipeline ranks"
    assert [microbatches(x) for x in (1.0, 2.5)] == ["1 microbatch", "2.5 microbatches"]
    assert microbatches(1.5, 2**30) == "1.5 microbatches (1.50 GiB)"


def test_memory_has_bytes_where_a_microbatch_has():
    line = timeline("v-half", 4, 8)
    assert figures(line).peak_bytes == 0
    assert figures(line, 2**20).peak_bytes == 3 * 2**20


@pytest.mark.parametrize(
    ("until", "apart", "found"),
    [(53, 8, [0, 10, 20, 30, 40, 50]), (5, 1, [0, 1, 2, 3, 4, 5]), (0.05, 0.02, [0, 0.02, 0.04]), (950, 201, [0, 500])],
)
def test_ticks_are_round_and_far_enough_apart(until, apart, found):
    assert ticks(until, apart) == pytest.approx(found)


def test_1f1b_above_its_own_memory_is_explained():
    base = figures(timeline("1f1b", 4, 8))
    assert above_itself([base]) == ""
    assert above_itself([replace(base, name="eager-1f1b", share=1.75)]) == ""
    assert "come on top, under 1F1B too" in above_itself([base, replace(base, share=1.257)])
