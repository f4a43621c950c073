"""A recorded run in every form: plan and run in one unit, nothing lost between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.measure.recorded_run import read_recorded
from megatron.schedules.report import drawing
from megatron.schedules.report.drawing import FILES, RUN, drawn, of_run, write_run
from megatron.schedules.report.views import PLANNED, scale, scaled, views
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import KINDS
from megatron.schedules.schedule.simulator import simulate
from tests.measure.test_recorded_run import made
from tests.report.made import saved, timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_the_plan_is_scaled_to_the_work_of_the_run():
    recorded = made(Costs.of(15, 10, 5, 1))
    assert scale(recorded) == pytest.approx(10)
    plan, run = views(recorded)
    assert plan.timeline.ideal == pytest.approx(run.timeline.ideal)
    assert plan.timeline.bubble == pytest.approx(recorded.planned.bubble)
    assert (plan.unit, run.unit) == ("microbatches", "bytes")
    assert run.timeline == recorded.timeline


def test_scaling_scales_all_that_is_a_time():
    line = saved()
    longer = scaled(replace(line, costs=replace(line.costs, comm=2.0, latencies={(0, 1): 3.0})), 4.0)
    assert longer.makespan == 4 * line.makespan
    assert longer.costs.durations == {kind: tuple(4 * t for t in line.costs.durations[kind]) for kind in KINDS}
    assert (longer.costs.latency(0, 1), longer.costs.latency(1, 0)) == (12.0, 8.0)
    assert (longer.bubble, longer.copying, longer.recomputed) == pytest.approx(
        (line.bubble, line.copying, line.recomputed)
    )
    assert longer.peaks == line.peaks


def test_the_slowest_stage_is_the_one_made_slow():
    weights = tuple(2.0 if stage == 5 else 1.0 for stage in range(8))
    schedule = timeline("v-half", 4, 8).schedule
    found = iteration_of(simulate(schedule, uneven(Costs(), weights).on(schedule.placement)))
    slow = found.slowest
    assert (slow.stage, schedule.placement.rank_of[slow.stage]) == (5, 2)
    assert found.stages[5] / 8 == pytest.approx(6) and 1 + slow.beyond_mean == pytest.approx(2 * 8 / 9)


def test_an_svg_tells_plan_and_run_apart():
    root = ElementTree.fromstring(drawn(of_run(made(Costs.of(2, 1, 1))), "svg"))
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert sum(word.startswith("V-Half planned") for word in words) == 1
    assert sum(word.startswith("V-Half measured") for word in words) == 1
    assert "time, ms" in words
    assert "its unit is 1.333 ms" in " ".join(words)


def test_all_files_are_written(tmp_path: Path):
    recorded = made(Costs.of(2, 1, 1))
    assert write_run(recorded, tmp_path / "new" / "folder") == [*FILES, RUN]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted([*FILES, RUN])
    assert read_recorded(tmp_path / "new" / "folder" / RUN) == recorded
    assert PLANNED in (tmp_path / "new" / "folder" / "timeline.html").read_text()


def test_what_is_too_large_for_a_form_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawing, "FORMS", {"svg": 10, "html": 1000, "trace": 1000})
    assert write_run(made(Costs()), tmp_path) == ["timeline.html", "timeline.trace.json", RUN]
