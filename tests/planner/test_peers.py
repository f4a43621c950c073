"""No schedule idles more than another project's schedule of the same name, and none buys that with more memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planner.made_schedules import planned
from tests.planner.promises import promised_memory
from tests.tiers import some_by_night

PEERS = json.loads(Path(__file__).with_name("peers_unit_costs.json").read_text())


@pytest.mark.parametrize(
    ("name", "d", "n", "bubble"),
    some_by_night(
        ((row["schedule"], row["d"], row["n"], row["bubble"]) for row in PEERS["rows"]),
        lambda name, d, n, bubble: d * n > 1024,
    ),
)
def test_no_peer_idles_less(name: str, d: int, n: int, bubble: float):
    timeline = planned(name, d, n)
    assert timeline.bubble <= bubble + 1e-4, "theirs are rounded to four places"
    assert timeline.peak <= promised_memory(name, d, n)
