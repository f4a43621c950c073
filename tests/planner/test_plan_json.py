"""A plan's JSON: its figures follow from it alone, it reads back as the same plan, and it keeps to its schema."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from megatron.schedules.cli.commands import main
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.measure.job_profile_json import to_text as job_profile_text
from megatron.schedules.planner.plan_json import PlanForm, from_text, schema, to_text
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.text_forms import from_csv, from_json
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import decode, encode
from tests.planner import plain_checker, plain_schema
from tests.planner.made_schedules import NAMED, costed_schedules, examples, timed
from tests.test_damaged_files import a_jobs_profile

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "plan.schema.json").read_text())
SIZE = "--pipeline-size 4 --microbatches 8 "
ADAPTIVE = f"--schedule adaptive {SIZE}"
MODEL = "--model Llama-3-8B "

CUSTOM: dict[str, dict[str, Any]] = {
    "weights.json": {"weight_share": 0.4},
    "copies.json": {"copy_time": 0.5},
    "messages.json": {"forward": 1, "input_grad": 1.1, "weight_grad": 0.75, "messages": [0.25, 0.4]},
    "one-way.json": {"copy_time": 0.3, "one_way": True},
    "both.json": {"forward": 1, "input_grad": 1.1, "weight_grad": 0.75, "latency": 0.05, "copy_time": 2.1},
    "csv.json": {"copy_time": 1.5},
    "csv-one-way.json": {"copy_time": 1.5, "one_way": True},
}
RECOMPUTED = """--num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 5000
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
PLANS = {
    **{name: f"--schedule {name} {SIZE} --costs 1,1.1,0.75,0.05" for name in NAMED},
    "four chunks": f"--schedule interleaved-1f1b:4 {SIZE}",
    "weight share": f"--schedule v-zb {SIZE} --costs weights.json",
    "uniform recompute": f"--schedule 1f1b {SIZE} --model recompute.sh",
    "half memory": f"{ADAPTIVE} --memory-limit 0.5 --costs 1,1.1,0.75,0.05",
    "a quarter, recomputed": f"{ADAPTIVE} --memory-limit 0.25 --save-memory recompute",
    "offloaded": f"{ADAPTIVE} --schedule adaptive:1 --memory-limit 0.5 --save-memory offload --costs copies.json",
    "offloaded one way": f"{ADAPTIVE} --schedule adaptive:1 --memory-limit 0.5 --save-memory offload "
    "--costs one-way.json",
    "both": f"{ADAPTIVE} --schedule adaptive:2 --memory-limit 0.3 --save-memory both --costs both.json",
    "messages, v-half": f"--schedule v-half {SIZE} --costs 1.3,1.4,0.75,0.05,0.3",
    "messages, zb-1p": f"--schedule zb-1p {SIZE} --costs messages.json",
    "messages, 1f1b": f"--schedule 1f1b {SIZE} --costs messages.json",
    "messages, adaptive": f"{ADAPTIVE} --memory-limit 0.6 --costs messages.json",
    "messages, recomputed": f"{ADAPTIVE} --memory-limit 0.25 --save-memory recompute --costs messages.json",
    "model": f"--schedule v-half {SIZE} {MODEL}",
    "automatic layers": f"--schedule 1f1b {SIZE} {MODEL} --layers auto",
    "adaptive model": f"{ADAPTIVE} --memory-limit 0.7 {MODEL} --schedule adaptive:2",
    "vocabulary parallelism": f"--schedule v-half {SIZE} {MODEL} --vocabulary-parallel --costs 1,1.1,0.75,0.05",
    "vocabulary parallelism, whole backwards": f"--schedule 1f1b {SIZE} {MODEL} --vocabulary-parallel",
    "vocabulary parallelism, adaptive": f"{ADAPTIVE} --memory-limit 0.7 {MODEL} --vocabulary-parallel "
    "--schedule adaptive:2",
    "a job's profile": "--schedule v-half --pipeline-size 2 --microbatches 8 --costs job.json",
    "a job's profile, offloaded": "--schedule adaptive --pipeline-size 2 --microbatches 8 --costs job.json "
    "--memory-limit 0.4 --save-memory both",
    "csv": "--schedule saving.csv --save-memory offload --costs csv.json",
    "csv, one way": "--schedule saving.csv --save-memory offload --costs csv-one-way.json",
    "huge costs": f"--schedule v-half {SIZE} --costs 1e99,1e99,1e99,1e90",
    "tiny costs": f"--schedule v-half {SIZE} --costs 1e-99,1e-99,1e-99",
}


# What the passes of a plan must be, for the plan to test what its name says.
KINDS = {
    "half memory": "FIW",
    "a quarter, recomputed": "R",
    "offloaded": "OL",
    "offloaded one way": "OL",
    "both": "ROL",
    "vocabulary parallelism": "ST",
    "vocabulary parallelism, whole backwards": "ST",
    "vocabulary parallelism, adaptive": "ST",
    "a job's profile, offloaded": "OL",
    "csv": "ROLB",
}


def close(value: Any, unit: float = 1.0) -> Any:
    """``value`` as it is but for rounding: peaks are rounded to nine digits, shares to twelve."""
    return pytest.approx(value, rel=1e-9, abs=2e-9 * unit)


def assert_follows(document: dict[str, Any]) -> dict[str, Any]:
    """What the checker finds, once it is what the document says."""
    found = plain_checker.check(document)
    told = dict(document["figures"])
    assert told.pop("lower_bound", 0) <= found["makespan"] * (1 + 1e-9)
    assert found["makespan"] == pytest.approx(told["makespan"], rel=1e-9)
    shares = {name: found[name] for name in told if name != "makespan"}
    assert shares == {name: close(told[name]) for name in shares}
    for name in ("recomputed", "copying"):
        assert name in told or found[name] == 0
    return found


@pytest.mark.parametrize("name", PLANS)
def test_figures_follow_from_the_json_alone(name: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recompute.sh").write_text(RECOMPUTED)
    Path("job.json").write_text(job_profile_text(a_jobs_profile(), versions={}, date="2026-01-01"))
    for file, fields in CUSTOM.items():
        Path(file).write_text(json.dumps({"version": 3, **fields}))
    monkeypatch.setenv(SEARCH_VARIABLE, "0.05")
    Path("saving.csv").write_text("0F0,0F1,0O0,0L0,0O1,0B0,0L1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n")
    assert main(["plan", *PLANS[name].split(), "--format", "json"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text)
    found = assert_follows(document)
    assert {work.strip("0123456789") for row in document["order"] for work in row} >= set(KINDS.get(name, "F"))
    # It keeps to the schema, and there is nothing that the form does not know.
    assert plain_schema.faults(document, SCHEMA, SCHEMA) == []
    assert json.loads(encode(decode(text, PlanForm))) == document
    timeline = from_text(text)
    assert timeline.schedule == from_json(text)
    assert found["start"] == [close(row, timeline.makespan) for row in timeline.start]
    assert found["end"] == [close(row, timeline.makespan) for row in timeline.end]


def document_of(timeline: Timeline, costs: Costs) -> str:
    schedule = timeline.schedule
    request = Request(schedule.name, schedule.ranks, schedule.microbatches, costs)
    return to_text(PlanForm.of(timeline, request, request))


@examples(100)
@given(costed_schedules())
def test_any_plan_can_be_checked_and_reads_back(made: tuple[Schedule, Costs]):
    schedule, costs = made
    timeline = timed(schedule, costs)
    text = document_of(timeline, costs)
    assert_follows(json.loads(text))
    assert from_text(text) == timeline


def test_every_sort_of_pass_and_copy_reads_back():
    csv = from_csv("0F0,0F1,0O0,0L0,0O1,0B0,0L1,0B1\n1F0,1R0,1I0,1F1,1R1,1B1,1W0\n")
    latencies = ((0, 1, 0.25), (1, 0, 2.0))
    for one_way in (False, True):
        costs = Costs(LayerTimes(1, 1, 1), link=Link(pairs=latencies), copies=HostCopies(1.5, one_way))
        timeline = timed(csv, costs, Decisions(recomputed=(0, 1), offloaded=(1, 0)))
        assert from_text(document_of(timeline, costs)) == timeline
        assert assert_follows(json.loads(document_of(timeline, costs)))["copying"] > 0


def test_the_checker_knows_nothing_of_this_package():
    assert "megatron" not in Path(plain_checker.__file__).read_text()


def test_the_checker_tells_wrong_figures():
    timeline = timed(plan(Request("v-half", 4, 8)))
    document = json.loads(document_of(timeline, Costs()))
    for name in ("makespan", "bubble", "span_bubble", "peak_memory", "memory_of_1f1b"):
        wrong = {**document, "figures": {**document["figures"], name: document["figures"][name] * 1.01}}
        with pytest.raises(AssertionError):
            assert_follows(wrong)


def test_the_committed_schema_is_that_of_the_form():
    """To write it: print(schema(), end="") into docs/plan.schema.json."""
    assert (DOCS / "plan.schema.json").read_text() == schema()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"microbatches": 0}, "$.microbatches: 0"),
        ({"microbatches": 1.5}, "$.microbatches: no integer"),
        ({"name": "a\nb"}, "$.name: no "),
        ({"costs": {}}, "$.costs lacks forward"),
        ({"placement": {"name": "v", "rank_of": []}}, "$.placement.rank_of: too few"),
        ({"order": [[1]]}, "$.order[0][0]: no string"),
    ],
)
def test_the_schema_tells_what_is_no_plan(change: dict[str, object], fault: str):
    document = json.loads(document_of(timed(plan(Request("v-half", 4, 8))), Costs()))
    assert plain_schema.faults(document, SCHEMA, SCHEMA) == []
    assert plain_schema.faults(document | change, SCHEMA, SCHEMA)[0].startswith(fault)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "$.version is version 2, and 1 is read here"),
        ({"stage_costs": None}, "$.stage_costs must be an object, not null"),
        ({"microbatches": 0}, "$.microbatches must be a whole number >= 1, not 0"),
        ({"layers": [1]}, "$.layers must have 8 values, one for each stage, not 1"),
        ({"order": [["0X0"]] * 4}, "$.order[0][0]: '0X0' is not a pass"),
    ],
)
def test_what_is_no_plan_is_refused_by_its_field(change: dict[str, object], said: str):
    text = document_of(timed(plan(Request("v-half", 4, 8))), Costs())
    with pytest.raises(PlanError) as caught:
        from_text(json.dumps(json.loads(text) | change))
    assert str(caught.value).startswith(said)


def test_passes_without_a_time_are_refused():
    csv = from_csv("0F0,0R0,0B0\n1F0,1B0\n")
    document = json.loads(document_of(timed(csv, Costs(), Decisions(recomputed=(1, 0))), Costs()))
    del document["stage_costs"]["times"]["R"]
    with pytest.raises(PlanError, match=r"^\$.stage_costs.times lacks 'R', and the order has such passes$"):
        from_text(json.dumps(document))


def test_what_parameters_hold_is_told():
    schedule = plan(Request("1f1b", 2, 2))
    timeline = simulate(schedule, replace(Costs().on(schedule.placement), standing=(3.0, 1.5)))
    text = document_of(timeline, Costs())
    assert json.loads(text)["stage_costs"]["standing"] == [3.0, 1.5]
    assert from_text(text) == timeline


@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "v-zb"])
def test_the_example_in_docs_finds_the_makespan(schedule: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*SIZE.split(), "--costs", "1,1.1,0.75,0.05", "--output", "plan.json"]
    assert main(["plan", "--schedule", schedule, *flags]) == 0
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "plan-json.md").read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 25
    assert set(re.findall(r"^(?:import|from) (\w+)", example, re.MULTILINE)) == {"json"}
    exec(compile(example, "plan-json.md", "exec"), {})
    makespan, told, bubble = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert makespan == told == pytest.approx(json.loads(Path("plan.json").read_text())["figures"]["makespan"], abs=0.01)
    assert 0 < bubble < 1


def test_docs_name_every_field():
    page = (DOCS / "plan-json.md").read_text()
    definitions = json.loads(schema())["$defs"]
    fields = {name for each in definitions.values() for name in each["properties"]}
    assert {name for name in fields if not re.search(rf"`(?:\w+\.)?{name}`", page)} == set()
