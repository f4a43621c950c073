"""What a recorder costs and how true it is: the figures of known times, and a run on emulated ranks that sleep."""

from __future__ import annotations

import math

import pytest

from benchmarks import recording
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate

REQUEST = Request("zb-1p", 2, 4, Costs.of(1, 1.25, 0.75))


def test_ranks_get_one_clock_and_their_figures_are_those_they_recorded():
    """Passes of 10 ms and messages of 0.5 ms, exactly, on clocks that are 7 s apart; recorded runs take 10 % longer."""
    schedule = plan(REQUEST)
    timeline = simulate(schedule, Costs.of(10, 12.5, 7.5, 0.5).on(schedule.placement))
    length = timeline.makespan / 1e3
    told = []
    for rank, rows in enumerate(zip(timeline.start, timeline.end, strict=True)):
        spans = [(start + 7000 * rank, end + 7000 * rank) for start, end in zip(*rows, strict=True)]
        taken = [(1.0, 1.0 + length / 1.1)] * 2, [(3.0, 3.0 + length)] * 2
        told.append((taken, [0.01, -0.02 * rank], [spans] * 2))
    row = recording.figures(schedule, told)
    assert row["schedule"] == "zb-1p"
    assert row["worst_pass_error"] == -0.02
    assert row["ratio"]["median"] == pytest.approx(1.1)
    assert row["aligned_length_over_wall"]["median"] == pytest.approx(1)
    assert row["latency_ms"]["median"] == pytest.approx(0.5)


def test_a_run_is_recorded():
    row = recording.row(REQUEST, repetitions=2, unit=0.005)
    for name in ("without_s", "recorded_s", "ratio", "latency_ms", "aligned_length_over_wall"):
        assert all(math.isfinite(value) for value in row[name].values()), name
    # Sleeping passes are never shorter than all of one rank's.
    assert min(row["without_s"]["low"], row["recorded_s"]["low"]) > 0.9 * 4 * 3 * 0.005
    assert "| zb-1p |" in recording.section([row])
