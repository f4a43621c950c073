"""What a recorder costs and how true it is, on emulated ranks that sleep."""

from __future__ import annotations

import pytest

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.registry import Request
from tools.benchmarks import recording


def test_passes_take_what_they_sleep_and_ranks_get_one_clock():
    row = recording.row(Request("zb-1p", 2, 4, Costs(1, 1.25, 0.75)), repetitions=2, unit=0.02)
    assert abs(row["worst_pass_error"]) < 0.03
    assert row["aligned_length_over_wall"]["median"] == pytest.approx(1, abs=0.03)
    assert 0 < row["hop_ms"]["median"] < 5
    assert row["ratio"]["median"] == pytest.approx(1, abs=0.05), "as far as two iterations on a busy machine tell"
    assert "| zb-1p |" in recording.section([row])
