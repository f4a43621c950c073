"""Jobs that write their timeline: what happened, in four files, and where they are."""

from __future__ import annotations

import errno
import json
import os

import pytest

from megatron.schedules.job.measuring import measured_iterations
from megatron.schedules.job.values import Measuring
from megatron.schedules.measure.recorded_run import read_recorded
from megatron.schedules.report.drawing import FILES, RUN, drawn, of_run, saved_timeline
from megatron.schedules.report.idle import idle
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils import output_files
from megatron.schedules.utils.errors import PlanError
from tests.integration.results import MODEL, UNTIED
from tests.measure.test_recorded_run import made


def test_a_job_writes_its_timeline(megatron, tmp_path):
    folder = tmp_path / "made" / "for it"
    flags = [*MODEL, *UNTIED, *"--train-iters 3 --global-batch-size 8 --pipeline-schedule zb-1p".split()]
    found = megatron(
        "outputs", 2, [*flags, *"--pipeline-model-parallel-size 2 --pipeline-measure".split(), str(folder)]
    )
    assert [code for code, _ in found] == [0, 0]
    assert sum(f"written to {folder}: timeline.html, timeline.svg" in text for _, text in found) == 1
    recorded = read_recorded(folder / RUN)
    assert recorded.iteration == 3, "of 2-3, the last"
    assert (recorded.timeline.schedule.name, recorded.timeline.schedule.ranks) == ("zb-1p", 2)
    assert 0 < recorded.timeline.bubble < 1
    assert all(max(held for _, held in steps) > 0 for steps in recorded.held), "bytes were counted"
    assert sum(rank.total for rank in idle(recorded.timeline)) == pytest.approx(
        recorded.timeline.bubble * 2 * recorded.timeline.makespan
    )
    drawing = of_run(recorded)
    for name, form in FILES.items():
        assert (folder / name).read_text() == drawn(drawing, form)
    events = json.loads((folder / "timeline.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] != "idle" for event in events) == drawing.passes


@pytest.mark.parametrize(
    ("iterations", "measured"), [(None, (3, 5)), (100, (3, 5)), (4, (3, 4)), (3, (2, 3)), (2, (1, 2))]
)
def test_what_is_measured_lies_within_the_job(tmp_path, iterations: int | None, measured: tuple[int, int]):
    found = measured_iterations(Measuring(tmp_path), iterations)
    assert found is not None
    assert (found.counted, found.last) == measured


def test_one_iteration_is_too_few(tmp_path):
    with pytest.raises(PlanError, match="takes two iterations"):
        measured_iterations(Measuring(tmp_path), 1)


def test_a_folder_that_went_away_stops_no_job(tmp_path):
    (tmp_path / "file").write_text("")
    said = saved_timeline(made(Costs()), tmp_path / "file")
    assert said.startswith("pipeline schedule: the timeline could not be written to")


def test_a_full_disk_stops_no_job_and_leaves_what_was_there(tmp_path, monkeypatch):
    saved_timeline(made(Costs()), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {RUN, *FILES}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_files.os, "fsync", full)
    said = saved_timeline(made(Costs(LayerTimes(2.0))), tmp_path)
    assert said == f"pipeline schedule: the timeline could not be written to {tmp_path}: No space left on device"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["half \ud800", "escape \x1b[31m", "zero \0", os.fsdecode(b"\xff")])
def test_any_name_of_a_folder_makes_one_printable_line(tmp_path, name):
    said = saved_timeline(made(Costs()), tmp_path / name)
    assert said.startswith("pipeline schedule: ") and said.isprintable()
