"""A recorded run is written and read again as it was, and what is none is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.schedules.measure.recorded_run import Recorded, read_recorded, to_text
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.utils.errors import PlanError


def made(measured: Costs) -> Recorded:
    """A run that went by ``measured`` and was planned for the paper's unit costs."""
    schedule = plan(Request("v-half", 4, 8))
    planned, timeline = (simulate(schedule, costs.on(schedule.placement)) for costs in (Costs(), measured))
    held = tuple(tuple((time, 1000.0 * amount) for time, amount in timeline.memory(rank)) for rank in range(4))
    return Recorded(timeline, planned, 12, "a device", held)


def test_it_is_read_as_it_was_written(tmp_path: Path):
    link, path = Link(0.5, ((0, 1, 0.75), (2, 1, 0.25))), tmp_path / "run.json"
    recorded = made(Costs(LayerTimes(1.5, 1.25, 0.75), link=link))
    path.write_text(to_text(recorded))
    assert read_recorded(path) == recorded


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 2}, "version 2, and 1 is read here"),
        ({"start": [[0.0]] * 4}, r"\$.start\[0\] must have 38 values, one for each pass of the rank, not 1"),
        ({"schedule": {}}, r"no recorded run: \$.schedule lacks 'name'"),
        ({"costs": None}, r"no recorded run: \$.costs must be an object, not null"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], what: str):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(to_text(made(Costs()))) | change))
    with pytest.raises(PlanError, match=what) as caught:
        read_recorded(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text("0F0,0B0\n")
    with pytest.raises(PlanError, match=r"no JSON: .*; --pipeline-measure writes such files"):
        read_recorded(path)
