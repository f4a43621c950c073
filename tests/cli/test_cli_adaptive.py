"""``megatron-schedules`` with a memory limit: what its flags ask for, and how near the best it says it comes."""

from __future__ import annotations

import json

import pytest

from megatron.schedules.cli import options
from megatron.schedules.cli.commands import main
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.planner import plan_cache
from megatron.schedules.planner.registry import NAMES
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.text_forms import from_csv
from tests.measure.custom import custom_costs
from tests.refused import assert_refused

SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
PLAN = ["plan", "--schedule", "v-half", *SIZE]
LIMITED = ["--memory-limit", "0.6"]
ADAPTIVE = ["plan", "--schedule", "adaptive", *SIZE, *LIMITED]


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setenv(SEARCH_VARIABLE, "0.01")


def test_adaptive_keeps_to_the_memory_and_says_how_near_the_best_it_is(capsys):
    assert main([*ADAPTIVE, "--costs", "1,1.1,0.75,0.05", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    figures = data["figures"]
    assert figures["memory_of_1f1b"] <= 0.6
    # The last of four ranks starts three forwards and three messages late, with four chunks a rank, and works 45.6.
    assert figures["lower_bound"] == pytest.approx(3 * (0.5 + 0.05) + 8 * 2 * (1 + 1.1 + 0.75))
    assert figures["lower_bound"] <= figures["makespan"]

    assert main([*ADAPTIVE, "--costs", "1,1.1,0.75,0.05"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    longer = 100 * (figures["makespan"] / figures["lower_bound"] - 1)
    assert last.startswith("No schedule within this memory ends before 47.25, a bubble of 3.49 %: ")
    assert last.endswith(f"is at most {longer:.2f} % longer than the best there is.")


def test_where_a_schedule_by_name_is_the_shortest_it_is_named(capsys, monkeypatch):
    monkeypatch.setenv(SEARCH_VARIABLE, "0.001")
    arguments = ["plan", "--schedule", "adaptive:2", *SIZE, "--memory-limit", "0.5"]
    assert main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("The shortest found within this memory is V-Min. No schedule within this memory ends before")
    assert main([*arguments, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    asked = {"schedule": "adaptive", "memory_limit": 0.5, "chunk_choices": [1, 2], "search_seconds": 0.001}
    assert (data["name"], data["asked"]) == ("v-min", asked)


def test_auto_says_what_it_chose_and_keeps_within_1f1bs_memory_without_a_limit(capsys):
    arguments = ["plan", "--schedule", "auto", *SIZE]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "\nSchedule: " in said and "within the limit of 100.0 %" in said
    assert main([*arguments, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["figures"]["memory_of_1f1b"] <= 1
    assert data["asked"]["schedule"] == "auto"


def test_a_limit_and_what_is_reported_are_of_the_same_memory(capsys):
    few = ["plan", "--schedule", "adaptive", "--pipeline-size", "8", "--microbatches", "4", "--format", "json"]
    assert main([*few, "--memory-limit", "0.25"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["peak_memory"] == 2
    assert figures["memory_of_1f1b"] == 0.25


def test_only_of_adaptive_is_it_said_how_near_the_best_it_is(capsys):
    assert main(PLAN) == 0
    assert "No schedule" not in capsys.readouterr().out
    assert main([*PLAN, "--format", "json"]) == 0
    assert "lower_bound" not in json.loads(capsys.readouterr().out)["figures"]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("adaptive", (1, 2, 4)),
        ("adaptive:1", (1,)),
        ("adaptive:2", (1, 2)),
        ("adaptive:3", (1, 2, 3)),
        ("adaptive:8", (1, 2, 4, 8)),
    ],
)
def test_adaptive_is_asked_for_what_the_flags_say(name, choices, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(
        options, "make_plan", lambda request, progress: asked.append(request) or make_plan(request, progress)
    )
    custom = custom_costs(tmp_path, weight_share=0.5)
    assert main([*ADAPTIVE, "--schedule", name, "--costs", custom, "--format", "csv"]) == 0
    assert from_csv(capsys.readouterr().out).placement.chunks in choices
    (request,) = asked
    assert (request.schedule, request.ranks, request.microbatches) == ("adaptive", 4, 8)
    assert (request.memory_limit, request.search_seconds, request.chunk_choices) == (0.6, 0.01, choices)
    assert request.costs.memory.weight_share == 0.5


def test_what_a_weight_gradient_leaves_makes_room(capsys, tmp_path):
    lengths = []
    for fields in ({}, {"weight_share": 0}):
        custom = custom_costs(tmp_path, **fields)
        assert main([*ADAPTIVE, "--memory-limit", "0.5", "--costs", custom, "--format", "json"]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["figures"]["makespan"])
    assert lengths[1] < lengths[0]


def test_an_adaptive_plan_is_found_once_and_then_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_SCHEDULES_CACHE", str(tmp_path))
    assert main(ADAPTIVE) == 0
    found = capsys.readouterr().out
    monkeypatch.setattr(plan_cache, "plan", None)
    assert main(ADAPTIVE) == 0
    assert capsys.readouterr().out == found


def test_compare_has_adaptive_too_where_there_is_a_limit(capsys):
    assert main(["compare", *SIZE, *LIMITED, "--format", "json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [name for name in NAMES if name != "file"]
    fitting = [row["bubble"] for name, row in rows.items() if name != "adaptive" and row["memory_of_1f1b"] <= 0.6]
    assert rows["adaptive"]["memory_of_1f1b"] <= 0.6
    assert rows["adaptive"]["bubble"] <= min(fitting)


def test_compare_says_which_limit_would_do(capsys):
    assert main(["compare", *SIZE, "--memory-limit", "0.2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("adaptive"))
    assert line.endswith("0.25 is the smallest that works")


def test_draw_draws_adaptive(capsys):
    assert main(["draw", "--schedule", "adaptive", *SIZE, *LIMITED]) == 0
    assert ">Adaptive<" in capsys.readouterr().out


WRONG = {
    "adaptive without a limit": (["plan", "--schedule", "adaptive", *SIZE], "--memory-limit is missing"),
    "compare adaptive without a limit": (["compare", "--schedule", "adaptive", *SIZE], "--memory-limit is missing"),
    "draw adaptive without a limit": (["draw", "--schedule", "adaptive", *SIZE], "--memory-limit is missing"),
    "a word for a limit": ([*ADAPTIVE, "--memory-limit", "half"], "--memory-limit 'half' is neither a fraction"),
    "a limit without end": ([*ADAPTIVE, "--memory-limit", "inf"], "--memory-limit 'inf' is neither a fraction"),
    "a limit of nothing": ([*ADAPTIVE, "--memory-limit", "0"], "--memory-limit '0' is neither a fraction"),
    "a limit below nothing": ([*ADAPTIVE, "--memory-limit", "-0.5"], "--memory-limit '-0.5' is neither a fraction"),
    "too small a limit": ([*ADAPTIVE, "--memory-limit", "0.2"], "0.25 is the smallest that works"),
    "a limit for what has a name": ([*PLAN, "--memory-limit", "0.5"], "--schedule adaptive or auto, not v-half"),
    "no chunk for adaptive": ([*ADAPTIVE, "--schedule", "adaptive:0"], "--schedule adaptive: 0 is too small"),
    "what no schedule may save": (
        [*PLAN, "--save-memory", "both"],
        "with --schedule adaptive or auto or file, not v-half",
    ),
    "a way to save that is none": ([*ADAPTIVE, "--save-memory", "auto"], "--save-memory 'auto' is unknown: use none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_and_status_2(case, capsys):
    assert_refused(*WRONG[case], capsys)


FIELDS = {
    "a share below none": ('{"weight_share": -1}', "$.weight_share must be"),
    "no such share": ('{"weight_share": 150}', "$.weight_share must be"),
    "a word for a share": ('{"weight_share": "half"}', "$.weight_share must be a number"),
    "a name that no field has": ('{"weight_shares": 1}', "must not have 'weight_shares'"),
    "two of three times": ('{"forward": 1, "weight_grad": 1}', "give forward, input_grad and weight_grad together"),
    "a latency of no passes": ('{"latency": 1}', "$.latency goes with forward, input_grad and weight_grad"),
    "one way of no copies": ('{"one_way": true}', "$.one_way goes with copy_time, which is missing"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field_of_a_cost_file_is_named(case, tmp_path, capsys):
    text, said = FIELDS[case]
    path = tmp_path / "custom.json"
    path.write_text('{"version": 3, ' + text[1:])
    assert_refused([*PLAN, "--costs", str(path)], said, capsys)


@pytest.mark.parametrize(("seconds", "said"), [("long", "'long' is not a number"), ("0", "0 is not above zero")])
def test_seconds_of_search_that_are_none_are_refused(monkeypatch, capsys, seconds, said):
    monkeypatch.setenv(SEARCH_VARIABLE, seconds)
    assert_refused(ADAPTIVE, f"${SEARCH_VARIABLE} {said}", capsys)
