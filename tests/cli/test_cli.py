"""The command ``megatron-schedules``, from its flags to its output and its one-line errors."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.measure.recorded_run import read_recorded, to_text
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.report.idle import idle
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.text_forms import from_csv, from_json, to_csv
from megatron.schedules.utils.printable import percent
from tests.measure.custom import custom_costs, written
from tests.measure.test_recorded_run import made
from tests.refused import assert_refused
from tests.terminal import on_a_terminal

ROOT = Path(__file__).parents[2]
SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
PLAN = ["plan", "--schedule", "v-half", *SIZE]


def command(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS")}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.schedules", *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "env": environment, **options},
    )


# --- plan ---------------------------------------------------------------------------------------------------------


def test_csv_is_the_plan(capsys):
    assert main([*PLAN, "--format", "csv"]) == 0
    assert from_csv(capsys.readouterr().out).order == plan(Request("v-half", 4, 8)).order


def test_json_is_the_plan_with_costs_and_figures(capsys):
    assert main([*PLAN, "--costs", "1,1.1,0.75,0.05", "--format", "json"]) == 0
    text = capsys.readouterr().out
    data = json.loads(text)
    assert data["costs"] == {"forward": 1, "input_grad": 1.1, "weight_grad": 0.75, "comm": 0.05}
    assert data["figures"]["peak_memory"] == 3
    assert 0 < data["figures"]["bubble"] < 0.2
    assert from_json(text).microbatches == 8


def test_text_off_a_terminal_is_plain_and_a_page_wide(capsys):
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert "\033" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "75.0 % of 1F1B's 4" in text


def test_chunks_are_those_asked_for(capsys):
    assert main(["plan", "--schedule", "interleaved-1f1b:3", *SIZE, "--format", "csv"]) == 0
    assert from_csv(capsys.readouterr().out).placement.chunks == 3


def test_a_csv_brings_its_own_size(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    assert main([*PLAN, "--output", str(path)]) == 0
    assert main(["plan", "--schedule", str(path), "--format", "csv"]) == 0
    assert capsys.readouterr().out == path.read_text()


@pytest.mark.parametrize(
    ("ending", "begins"),
    [
        ("csv", "0F0,"),
        ("json", "{"),
        ("svg", "<svg"),
        ("txt", "V-Half:"),
        ("html", "<!doctype html>"),
        ("HTM", "<!doctype html>"),
    ],
)
def test_the_ending_of_the_file_chooses_the_format(tmp_path, ending, begins, capsys):
    path = tmp_path / f"plan.{ending}"
    path.write_text("something longer than the plan " * 10_000)
    assert main([*PLAN, "--output", str(path)]) == 0
    assert path.read_text().startswith(begins)
    assert "something longer" not in path.read_text()
    assert capsys.readouterr().out == ""


# --- compare and draw ---------------------------------------------------------------------------------------------


def test_compare_has_every_schedule(capsys):
    assert main(["compare", *SIZE]) == 0
    compared, said = capsys.readouterr().out.split("\n\n")
    lines = compared.splitlines()[3:]
    assert [line.split()[0] for line in lines] == [name for name in NAMES if name not in ("adaptive", "file")]
    assert (
        said == "adaptive is not shown: --memory-limit 0.5 adds the shortest schedule within half of 1F1B's memory.\n"
    )


@pytest.mark.parametrize(
    "more",
    [
        ["--schedule", "1f1b"],
        ["--format", "markdown"],
        ["--format", "csv"],
        ["--memory-limit", "0.5"],
    ],
)
def test_compare_speaks_of_adaptive_only_where_it_is_left_out_unasked(more, monkeypatch, capsys):
    monkeypatch.setenv(SEARCH_VARIABLE, "0.1")
    assert main(["compare", *SIZE, *more]) == 0
    assert "adaptive is not shown" not in capsys.readouterr().out


def test_compare_says_why_1f1b_holds_more_than_1f1bs_memory(capsys):
    asked = ["compare", *SIZE, "--schedule", "1f1b"]
    for form in ("text", "markdown"):
        assert main([*asked, "--format", form, "--model", "Llama-3-8B", "--vocabulary-parallel"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "100 % of 1F1B's memory is what d microbatches hold in the layers of an average rank" in said
        assert main([*asked, "--format", form]) == 0
        assert "is what d microbatches" not in capsys.readouterr().out


def test_compare_gives_a_reason_where_there_is_no_plan(capsys):
    assert main(["compare", *SIZE, "--schedule", "interleaved-1f1b:1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("interleaved-1f1b"))
    assert "at least 2 chunks" in line


def test_a_csv_is_named_in_its_heading_and_in_its_errors(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(plan(Request("zb-1p", 4, 8))))
    assert main(["plan", "--schedule", str(path)]) == 0
    assert capsys.readouterr().out.startswith("mine.csv: 4 pipeline ranks")
    path.write_text(path.read_text().replace("0F0", "0F9"))
    assert_refused(["plan", "--schedule", str(path)], "--schedule: mine.csv: 0F0 is missing", capsys)
    path.write_text(path.read_text().replace("0F9", "0Q0"))
    assert_refused(["plan", "--schedule", str(path)], "--schedule: mine.csv: CSV row 1, cell 1: '0Q0' is not", capsys)


def test_compare_takes_a_csv_too(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    assert main([*PLAN, "--output", str(path)]) == 0
    arguments = ["compare", "--schedule", "v-half", "--schedule", str(path)]
    assert main([*arguments, "--format", "json"]) == 0
    half, mine = json.loads(capsys.readouterr().out)
    assert half.pop("schedule") == "v-half"
    assert mine.pop("schedule") == str(path)
    assert half == mine


def test_draw_puts_1f1b_above_v_half(capsys):
    assert main(["draw", *SIZE]) == 0
    text = capsys.readouterr().out
    assert text.startswith("<svg")
    assert text.index(">1F1B<") < text.index(">V-Half<")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.svg", "<svg"),
        ("a.html", "<!doctype html>"),
        ("a.trace.json", '{"traceEvents"'),
        ("a.trace", '{"traceEvents"'),
    ],
)
@pytest.mark.parametrize("of", ["plans", "run"])
def test_draw_draws_plans_and_runs_in_every_form(tmp_path, name, begins, of, capsys):
    (tmp_path / "run.json").write_text(to_text(made(Costs.of(2, 1, 1))))
    asked = SIZE if of == "plans" else ["--recorded", str(tmp_path / "run.json")]
    assert main(["draw", *asked, "--output", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    assert text.startswith(begins)
    assert all(word in text for word in (("1F1B", "V-Half") if of == "plans" else ("planned", "measured")))
    assert capsys.readouterr().out == ""


def test_a_run_is_drawn_in_the_terminal_too(tmp_path, capsys):
    recorded = made(Costs.of(2, 1, 1))
    (tmp_path / "run.json").write_text(to_text(recorded))
    assert main(["draw", "--recorded", str(tmp_path / "run.json"), "--format", "text"]) == 0
    text = capsys.readouterr().out
    assert text.index("V-Half planned:") < text.index("V-Half measured:")
    for timeline in (recorded.planned, recorded.timeline):
        assert f"{100 * timeline.bubble:.2f} %" in text


def test_what_is_too_large_to_look_at_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("megatron.schedules.cli.commands.FORMS", {"svg": 10, "html": 1000, "trace": 20})
    said = "would be too large to look at: 10 at most; use --format html or text"
    assert_refused(["draw", *SIZE, "--format", "svg"], said, capsys)
    assert main(["draw", *SIZE, "--format", "html"]) == 0


DRAWN = {
    "docs/images/vocabulary.svg": [
        *("--schedule", "1f1b", "--schedule", "v-zb", "--costs", "1,1.1,0.75,0.05"),
        *("--model", "Llama-3-8B", "--vocabulary-parallel"),
    ],
    "docs/images/v-half.svg": ["--costs", "1,1,1,0"],
    "docs/images/schedules.svg": [
        *("--schedule", "1f1b", "--schedule", "zb-1p", "--schedule", "v-min"),
        *("--schedule", "v-half", "--schedule", "v-zb", "--costs", "1,1.1,0.75,0.05"),
    ],
}


@pytest.mark.parametrize("path", DRAWN)
def test_the_drawings_in_docs_are_what_draw_draws(path, capsys):
    arguments = ["draw", *SIZE, *DRAWN[path]]
    assert main(arguments) == 0
    drawn = capsys.readouterr().out
    assert (ROOT / path).read_text() == drawn, f"draw it anew: megatron-schedules {' '.join(arguments)} --output {path}"


@pytest.mark.parametrize(("drawing", "run"), [("timeline.svg", "recorded.json"), ("cured.svg", "recorded-cured.json")])
def test_the_runs_in_docs_are_drawn_as_recorded(drawing, run, capsys):
    path, arguments = f"docs/images/{drawing}", ["draw", "--recorded", str(ROOT / "docs" / run)]
    assert main(arguments) == 0
    drawn = capsys.readouterr().out
    assert (ROOT / path).read_text() == drawn, f"draw it anew: megatron-schedules {' '.join(arguments)} --output {path}"


def test_the_run_in_docs_is_told_as_recorded():
    text = " ".join((ROOT / "docs" / "bubble.md").read_text().split())
    recorded = read_recorded(ROOT / "docs" / "recorded.json")
    planned, measured = percent(recorded.planned.bubble), percent(recorded.timeline.bubble)
    assert f"planned at {planned} and came to {measured}" in text
    assert f"takes {recorded.timeline.makespan:.0f} ms, its bubble is {measured} where {planned} was planned" in text
    for rank in idle(recorded.timeline):
        whole = recorded.timeline.makespan
        shares = [percent(time / whole) for time in (rank.total, *rank.phases.values())]
        whom = ", ".join(f"rank {other} ({percent(time / whole, 1)})" for other, time in rank.for_ranks)
        assert f"| {rank.rank} | {' | '.join(shares)} | {whom} |" in text


def test_a_csv_with_r_o_and_l_is_of_all_layers_of_its_stages(tmp_path, capsys):
    """Stage 0 is offloaded, stage 1 recomputed; a forward takes 2, what one stage holds is copied in 3."""
    path = tmp_path / "saving.csv"
    path.write_text("0F0,0F1,0O0,0L0,0O1,0B0,0L1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n")
    custom = custom_costs(tmp_path, copy_time=1.5)
    asked = ["plan", "--schedule", str(path), "--save-memory", "offload", "--costs", custom]
    assert main([*asked, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["recomputed"], data["offloaded"], data["costs"]["copy"]) == ([0, 1], [1, 0], 1.5)
    # F takes 2 and B 4, two of each on both ranks; the second R and B of rank 1 hold rank 0 up.
    figures = data["figures"]
    assert figures["makespan"] == 22
    assert figures["bubble"] == pytest.approx(1 - (12 + 16) / 2 / 22)
    assert figures["recomputed"] == pytest.approx(4 / 28)
    assert figures["useful"] == pytest.approx(12 / 22)
    assert figures["copying"] == pytest.approx(6 / 22)
    assert main([*asked, "--format", "csv"]) == 0
    assert capsys.readouterr().out == path.read_text()
    one_way = custom_costs(tmp_path, copy_time=1.5, one_way=True)
    assert main([*asked, "--costs", one_way, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["copying"] == pytest.approx(12 / 22)


def test_a_stage_with_both_r_and_o_has_half_of_each(tmp_path, capsys):
    path = tmp_path / "both.csv"
    path.write_text("0F0,0O0,0L0,0R0,0B0\n1F0,1B0\n")
    assert main(["plan", "--schedule", str(path), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["recomputed"], data["offloaded"]) == ([0.5, 0], [0.5, 0])
    llama = ["--model", "Llama-3-8B", "--layers", "13,19"]
    assert main(["plan", "--schedule", str(path), *llama, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["recomputed"][0] * 13, data["offloaded"][0] * 13) == pytest.approx((6, 7))


def test_the_time_of_a_copy_is_what_a_profile_has_or_follows_from_a_speed(tmp_path, capsys):
    """Two layers hold 4000 bytes, four are half a rank's, and 10**6 bytes are copied in a second."""
    rates = {"copy_gbps": {"to_host": 0.002, "from_host": 0.002, "both_ways": 0.001}}
    path = tmp_path / "profile.json"
    asked = ["plan", "--schedule", str(tmp_path / "o.csv"), "--costs", str(path), "--format", "json"]
    (tmp_path / "o.csv").write_text("0F0,0O0,0L0,0B0\n1F0,1B0\n")
    for flags, copy in (([], 8.0), (["--save-memory", "offload"], 8.0), (["--save-memory", "offload=0.0005"], 16.0)):
        written(path, 16, **rates)
        assert main([*asked, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["costs"]["copy"] == pytest.approx(copy)
    written(path, 16)
    said = "--save-memory offload takes the time of copies from --costs FILE.json: give copy_time"
    assert_refused([*asked, "--save-memory", "offload"], said, capsys)
    given = ["--save-memory", "offload=25", "--costs", "1,1,1"]
    assert_refused(
        [*asked, *given], "--save-memory offload=25 needs bytes, from --model or a profile in --costs", capsys
    )


def test_a_limit_in_gib_is_of_the_bytes_of_a_profile(tmp_path, capsys):
    """Two of sixteen layers hold 4000 bytes, so 1F1B's two microbatches on two ranks hold 32000."""
    path = written(tmp_path / "profile.json", 16)
    size = ["--pipeline-size", "2", "--microbatches", "4", "--costs", str(path)]
    asked = ["plan", "--schedule", "adaptive", *size, "--format", "json"]
    assert main([*asked, "--memory-limit", f"{24000 / 2**30}GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["memory_limit"] == pytest.approx(0.75)
    assert_refused(
        [*asked, "--memory-limit", "1GiB", "--costs", "1,1,1"],
        "needs bytes, from --model or a profile in --costs",
        capsys,
    )
    assert_refused([*asked, "--memory-limit", "auto"], "--memory-limit auto is for training", capsys)


# --- what is wrong ends in one line -------------------------------------------------------------------------------

WRONG = {
    "no command": ([], "plan, compare or draw"),
    "unknown command": (["paln"], "No such command 'paln'"),
    "unknown flag": ([*PLAN, "--colour"], "No such option"),
    "misspelt flag": (["plan", "--schedul", "v-half", *SIZE], "--schedule"),
    "flag without a value": (["plan", "--schedule"], "--schedule"),
    "left-over word": ([*PLAN, "v-min"], "v-min"),
    "no schedule": (["plan", *SIZE], "--schedule is missing: name one of auto, 1f1b"),
    "unknown schedule": (["plan", "--schedule", "v-hlaf", *SIZE], "did you mean v-half?"),
    "nothing like a schedule": (["compare", "--schedule", "xyz", *SIZE], "use one of auto, 1f1b"),
    "no size": (["compare", "--microbatches", "8"], "--pipeline-size is missing"),
    "no microbatches": (["draw", "--pipeline-size", "4"], "--microbatches is missing"),
    "one rank": (["compare", "--pipeline-size", "1", "--microbatches", "8"], "--pipeline-size 1"),
    "a word for a number": (["compare", "--pipeline-size", "four", "--microbatches", "8"], "'four'"),
    "no microbatch": (["compare", "--pipeline-size", "4", "--microbatches", "0"], "--microbatches 0"),
    "half a microbatch": (["compare", "--pipeline-size", "4", "--microbatches", "1.5"], "'1.5'"),
    "minus one": (["compare", "--pipeline-size", "4", "--microbatches", "-1"], "--microbatches -1"),
    "too large": (["compare", "--pipeline-size", "4", "--microbatches", "9" * 30], "too large"),
    "two costs": ([*PLAN, "--costs", "1,2"], "--costs"),
    "words for costs": ([*PLAN, "--costs", "a,b,c"], "'a,b,c'"),
    "a cost of zero": ([*PLAN, "--costs", "1,0,1"], "must be positive"),
    "a cost that is none": ([*PLAN, "--costs", "1,nan,1"], "must be positive"),
    "a negative latency": ([*PLAN, "--costs", "1,1,1,-1"], "P2P latency"),
    "unknown format": ([*PLAN, "--format", "xml"], "use one of text, csv, json, svg"),
    "unknown ending": (
        [*PLAN, "--output", "plan.xml"],
        "--output plan.xml ends in .xml, which is not known here: use .txt, .csv, .json, .svg, .html, .png, .pdf; or "
        "--format",
    ),
    "ending of another command": (["draw", *SIZE, "--output", "plan.csv"], "use .svg, .txt, .html, .json, .png, .pdf"),
    "unknown ending of a comparison": (["compare", *SIZE, "--output", "x.xls"], "use .txt, .md, .csv, .json"),
    "format of another command": (["draw", *SIZE, "--format", "csv"], "use one of svg, text, html, trace"),
    "a run and a schedule": (["draw", "--recorded", "run.json", "--schedule", "1f1b"], "costs: leave out --schedule"),
    "a run and a size": (
        ["draw", "--recorded", "run.json", "--pipeline-size", "4"],
        "costs: leave out --pipeline-size",
    ),
    "no such run": (["draw", "--recorded", "/no/such.json"], "--recorded: cannot read"),
    "no run in the file": (
        ["draw", "--recorded", str(ROOT / "LICENSE")],
        "LICENSE is no recorded run: it is no JSON: JSON is malformed: invalid character (byte 34); --pipeline-",
    ),
    "no chunk": ([*PLAN, "--schedule", "adaptive:0"], "--schedule adaptive: 0 is too small"),
    "chunks where there is no choice": ([*PLAN, "--schedule", "v-half:3"], "v-half has 2"),
    "no folder to write to": ([*PLAN, "--output", "/no/such/folder/plan"], "--output: cannot write"),
    "a folder as output": ([*PLAN, "--output", "/"], "--output: cannot write"),
    "no CSV": (["plan", "--schedule", "file", *SIZE], "--schedule file: name the CSV itself"),
    "no such CSV": (["plan", "--schedule", "/no/such.csv"], "--schedule: cannot read"),
    "chunks of a CSV": ([*PLAN, "--schedule", "mine.csv:2"], "unknown schedule 'mine.csv'"),
    "no cost file": ([*PLAN, "--costs", str(ROOT / "LICENSE")], "or name a FILE.json"),
}


@pytest.mark.parametrize(
    ("original", "said"), [(ROOT / "LICENSE", "CSV row 2, cell 1"), (sys.executable, "not a text")]
)
def test_a_csv_that_is_none_is_refused(tmp_path, capsys, original, said):
    path = tmp_path / "none.csv"
    path.symlink_to(original)
    assert_refused(["plan", "--schedule", str(path)], said, capsys)


@pytest.mark.parametrize("case", WRONG)
def test_one_line_and_status_2(case, capsys):
    assert_refused(*WRONG[case], capsys)


@pytest.mark.parametrize(
    ("csv", "said"),
    [
        ("0F0,0B0\n1F0\n", "1B0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "0B0 stands 2 times"),
        ("0F0,0B0\n1F0,1X0\n", "CSV row 2, cell 2"),
        ("0B0,0F0\n1F0,1B0\n", "0B0"),
        ("", "empty"),
    ],
)
def test_a_wrong_csv_is_one_line(tmp_path, csv, said, capsys):
    path = tmp_path / "wrong.csv"
    path.write_text(csv)
    assert main(["plan", "--schedule", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


def test_a_csv_for_another_size_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    assert main([*PLAN, "--output", str(path)]) == 0
    assert main(["plan", "--schedule", str(path), "--pipeline-size", "2"]) == 2
    assert "4 pipeline ranks, but 2 were asked for" in capsys.readouterr().err


# --- help, and how it behaves as a program ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "compare", "draw"])
def test_help_explains_every_flag_and_schedule(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    for schedule in NAMES:
        assert schedule in text
    for flag in ("--pipeline-size", "--microbatches", "--costs", "--schedule", "--format", "--output"):
        assert flag in text
    for flag in ("--memory-limit", "--save-memory", "--layers", "--vocabulary-parallel"):
        assert flag in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megatron-schedules 0.")


def test_a_closed_pipe_is_no_error():
    process = command("plan", "--schedule", "1f1b", "--pipeline-size", "8", "--microbatches", "400", "--format", "csv")
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        process = command(*PLAN, stdout=full)
    assert process.communicate()[1].count(b"\n") == 1
    assert process.returncode == 2


def test_an_ascii_terminal_gets_a_drawing():
    process = command(*PLAN, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"FFFF" in out


def _processor_seconds(start: Callable[[], subprocess.Popen[bytes]]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start().communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_starting_takes_no_torch_and_not_long():
    # About half a second, on a machine where two libraries that such commands import take 0.1 s.
    libraries = [sys.executable, "-c", "import click, rich.console"]
    for _ in range(3):  # machines have their moments
        ours = _processor_seconds(lambda: command("-h"))
        theirs = _processor_seconds(lambda: subprocess.Popen(libraries))
        if ours < 6 * theirs:
            break
    assert ours < 6 * theirs
    code = (
        "import sys; from megatron.schedules.cli.commands import main; "
        "main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code, *PLAN], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in found.stderr.split()}
    assert not loaded & {"torch", "numpy", "ortools", "numba"}
    assert not [name for name in found.stderr.split() if name.startswith(("megatron.core", "megatron.training"))]


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_on_a_terminal_unless_not_wanted(environment, coloured):
    shown = on_a_terminal(PLAN, environment)
    assert ("48;5;" in shown) == coloured
    assert ("FFFF" in shown) == (not coloured)
