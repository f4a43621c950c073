"""JSON files: what is written is read back equal, files written so far are read, and a refusal names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.schedules.measure import cost_file, job_profile_json, recorded_run
from megatron.schedules.planner.replanning import Expected, Proposal
from megatron.schedules.schedule.costs_json import ByKind, ByShare
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.text_forms import from_record, to_record
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import MOST, encode
from tests.planner.made_schedules import planned
from tests.test_damaged_files import a_jobs_profile, a_run, changed

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_run_is_read_as_it_was_written(offloaded: bool):
    run = a_run(offloaded)
    assert any(map(any, run.timeline.copies)) == offloaded
    assert recorded_run.from_text(recorded_run.to_text(run)) == run


def test_a_jobs_profile_is_read_as_it_was_written():
    profile = a_jobs_profile()
    text = job_profile_json.to_text(profile, versions={"torch": "2.9"}, date="2026-01-01")
    assert job_profile_json.from_text(text) == profile
    assert (json.loads(text)["versions"], json.loads(text)["date"]) == ({"torch": "2.9"}, "2026-01-01")


@pytest.mark.parametrize("name", ["recorded.json", "recorded-cured.json"])
def test_runs_recorded_so_far_are_read_and_written_again_as_they_were(name: str):
    text = (DOCS / name).read_text()
    assert json.loads(recorded_run.to_text(recorded_run.from_text(text))) == json.loads(text)


def test_a_record_of_a_schedule_is_what_json_is_made_of():
    schedule = planned("v-half", 3, 5).schedule
    record = to_record(schedule)
    assert json.loads(json.dumps(record)) == json.loads(encode(record))
    assert from_record(json.loads(json.dumps(record))) == schedule
    with pytest.raises(PlanError, match=r"not a schedule: \$.order\[1\]\[0\]: 'x' is not a pass"):
        from_record({**record, "order": [record["order"][0], ["x"], record["order"][2]]})


def test_every_kind_and_share_has_its_field():
    assert set(ByKind.__struct_fields__) == set(Kind)
    assert ByShare.__struct_fields__ == tuple(share.name for share in Share)


def test_numbers_of_numpy_are_written_as_numbers():
    assert encode([numpy.float64(1.5), 2.0]) == "[1.5,2.0]"


A_PROPOSAL = Proposal(Expected(2.0, 0.5), Expected(1.0, 0.25), "0F0,0B0\n")


def test_a_proposal_is_read_as_it_was_written():
    assert Proposal.from_text(A_PROPOSAL.to_text()) == A_PROPOSAL
    assert json.loads(A_PROPOSAL.to_text()) == {"before": [2.0, 0.5], "after": [1.0, 0.25], "csv": "0F0,0B0\n"}


@pytest.mark.parametrize(
    "text", ["", "3", "{}", "[" * 5000, '{"before": [1], "after": [1, 2], "csv": ""}', "null", '{"csv": 3}']
)
def test_what_is_no_proposal_is_refused(text: str):
    with pytest.raises(PlanError):
        Proposal.from_text(text)


RUN, JOB = json.loads(recorded_run.to_text(a_run())), json.loads(job_profile_json.to_text(a_jobs_profile()))


@pytest.mark.parametrize(
    ("data", "path", "value", "why"),
    [
        (RUN, ("start", 0, 1), -1, r"\$.start\[0\]\[1\] must be a number >= -0.001, not -1"),
        (RUN, ("start", 0, 1), 0.5, r"\$.start\[0\]\[1\] is 0.5, before the end of the pass before it at 2"),
        (RUN, ("start", 0, 0), 2.5, r"\$.end\[0\]\[0\] is 2, before the start of the pass at 2.5"),
        (RUN, ("end", 0, 0), 1e16, rf"\$.end\[0\]\[0\] must be a number <= {MOST}, not 1e\+16"),
        (RUN, ("end", 1), [], r"\$.end\[1\] must have \d+ values, one for each pass of the rank, not 0"),
        (RUN, ("copies", 0, 0, 0), "0F0", r"\$.copies\[0\]\[0\]: 0F0 is no copy that rank 0 makes"),
        (RUN, ("copies", 0, 0, 0), "hello", r"\$.copies\[0\]\[0\]: 'hello' is not a pass"),
        (RUN, ("copies", 0), [["0O0", 2, 1]], r"\$.copies\[0\]\[0\] ends at 1, before its start at 2"),
        (RUN, ("copies",), [[]], r"\$.copies must have 2 values, one for each rank, not 1"),
        (RUN, ("held", 1), [], r"\$.held\[1\] must be a list of length >= 1"),
        (RUN, ("held", 1), [[1, 1], [0, 0]], r"\$.held\[1\]\[1\] is at 0, before the step before it at 1"),
        (RUN, ("held",), [[[0, 0]]], r"\$.held must have 2 values, one for each rank, not 1"),
        (RUN, ("costs", "times", "F"), [1], r"\$.costs.times.F must have 2 values, one for each stage, not 1"),
        (RUN, ("costs", "times"), {"F": [1]}, r"\$.costs.times lacks 'I'"),
        (RUN, ("costs", "times", "X"), [1], r"\$.costs.times must not have 'X'"),
        (
            RUN,
            ("costs", "latencies"),
            [[0, 5, 1]],
            r"\$.costs.latencies\[0\] must be between two of 2 ranks, not from 0 to 5",
        ),
        (
            RUN,
            ("costs", "latencies"),
            [[0, 1, 1], [0, 1, 2]],
            r"\$.costs.latencies\[1\] is from rank 0 to 1, as one before",
        ),
        (RUN, ("schedule", "order", 0, 0), "0F1", r"\$.schedule.order: .*: 0F1 stands 2 times"),
        (RUN, ("schedule", "placement", "rank_of"), [0, 2], r"\$.schedule.placement.rank_of: ranks must be numbered"),
        (RUN, ("device",), "\x1b[1m", r"\$.device must be a text without control characters"),
        (RUN, ("device",), "x" * 2000, r"\$.device must be a text of length <= 1000"),
        (
            JOB,
            ("stages", 3, "passes", "F", "median"),
            None,
            r"\$.stages\[3\].passes.F.median must be a number, not null",
        ),
        (JOB, ("stages", 0, "layers"), 3, r"\$.stages have 9 layers, and \$.model.layers is 8"),
        (JOB, ("stages", 0, "layers"), True, r"\$.stages\[0\].layers must be a whole number, not true or false"),
        (JOB, ("iterations",), [5, 3], r"\$.iterations must be the first and the last one that were timed"),
        (JOB, ("latencies",), [[0, 0, 1]], r"\$.latencies\[0\] must be between two of 2 ranks, not from 0 to 0"),
        (JOB, ("times_in",), "s", r"\$.times_in is wrong: invalid enum value 's'"),
        (JOB, ("model", "layers"), 10**30, rf"\$.model.layers must be a whole number <= 10000, not {10**30}"),
    ],
)
def test_a_refusal_names_the_field(data: Any, path: tuple[Any, ...], value: Any, why: str, tmp_path: Path):
    file = tmp_path / "file.json"
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    there = isinstance(inner, list) or path[-1] in inner
    text = json.dumps(value)
    file.write_text(
        changed(data, path, text) if there else changed(data, path[:-1], json.dumps({**inner, path[-1]: value}))
    )
    with pytest.raises(PlanError, match=why) as caught:
        (recorded_run.read_recorded if data is RUN else cost_file.read_profile)(file)
    assert str(caught.value).startswith(f"{file} is no ") and str(caught.value).endswith("such files")
    assert "\n" not in str(caught.value)


def test_clocks_may_disagree_by_a_microsecond():
    data = json.loads(json.dumps(RUN))
    data["start"][0][0] = -1e-4
    data["start"][0][1] -= 5e-4
    read = recorded_run.from_text(json.dumps(data))
    assert read.timeline.start[0][0] == -1e-4
