"""scripts/run_gpu_tests.sh: what becomes of every piece, and what is said of it; of GPUs nothing can be shown here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.emulated_ranks import RankError
from megatron.schedules.integration.cpu.te_python import CAPABILITY_VARIABLE
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.program import Action
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.simulator import simulate
from tests.integration.server import VERSIONS
from tests.tools import gpu_pieces
from tests.waiting import HANGS_S
from tools.gpu_tests import __main__ as program
from tools.gpu_tests import comparing, needs, one_gpu, report
from tools.gpu_tests.layouts import layout_of
from tools.gpu_tests.pieces import FAULT, LAYOUTS, PIECES, Setting, chosen, lacking
from tools.gpu_tests.ranks import run_ranks
from tools.gpu_tests.report import Outcome, Result
from tools.gpu_tests.running import run_apart
from tools.gpu_tests.timeline import Span, against_the_simulator, measured_costs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_gpu_tests.sh"
ON_CPU, ONE_GPU = Setting(True, 0), Setting(False, 1)


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, env=variables, timeout=500)


# Pieces


def test_the_piece_about_memory_names_every_row_of_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    sizes = {"pipeline_size": 2, "planned_bytes": [100, 200], "measured_bytes": [100, 250], "worst_error": 0.25}
    rows = [{"schedule": "v-min"} | sizes, {"memory_saving": "recompute", "limit": 0.25} | sizes]
    monkeypatch.setattr(one_gpu.memory, "measure", lambda quick, say: iter(rows))
    found = list(one_gpu.memory_as_planned(ON_CPU))
    assert [row["schedule"] for row in found] == ["v-min", "recompute within 25.0%"]
    assert [row[FAULT] for row in found] == ["+25.0 % off the plan"] * 2


@pytest.mark.parametrize(
    ("name", "result", "note", "rows"),
    [
        ("faulty", Result.FAILED, "1 of 2 rows: 2 is not 3", 2),
        ("raises", Result.FAILED, "ValueError: no more rows; see raises.log", 1),
        ("dies", Result.FAILED, "died without a word; see dies.log", 1),
        ("skips", Result.SKIPPED, "there is no such library", 0),
        ("finds_nothing", Result.FAILED, "looked at nothing", 0),
    ],
)
def test_however_a_piece_ends_it_has_a_result_and_the_rows_it_found(tmp_path, name, result, note, rows):
    outcome = run_apart(gpu_pieces.piece(name), ON_CPU, tmp_path)
    assert (outcome.result, outcome.note, len(outcome.rows)) == (result, note, rows)


def test_a_piece_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    """Which would sleep on for as long as the test may take."""
    outcome = run_apart(gpu_pieces.piece("sleeps", limit_s=8.0), ON_CPU, tmp_path)
    assert (outcome.result, outcome.note) == (Result.FAILED, "not done after 8 s, and ended; see sleeps.log")
    assert gone(outcome.rows[0]["child"])


def test_processes_that_a_piece_leaves_behind_are_ended_and_reported(tmp_path):
    outcome = run_apart(gpu_pieces.piece("leaves"), ON_CPU, tmp_path)
    assert (outcome.result, outcome.note) == (Result.FAILED, "left processes behind, which were ended")
    assert gone(outcome.rows[0]["child"])


def gone(process: int) -> bool:
    """Whether it has ended; nobody may have asked for its status yet."""
    for _ in range(100):
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_ranks_give_their_results_in_order_and_keep_their_environment_to_themselves():
    body = partial(gpu_pieces.rank_of_two, "ends well")
    assert run_ranks(2, body, {"MORE": "x", "RANKS": "2"}, timeout=HANGS_S) == ["0 of 2 x", "1 of 2 x"]
    assert "MORE" not in os.environ


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raises", "rank 1: ValueError: not today"),
        ("dies", "rank 1: it died without a word"),
        ("hangs", "ranks [1] are not done in time"),
    ],
)
def test_a_rank_that_does_not_end_well_ends_the_job_and_is_heard(ending, said):
    body = partial(gpu_pieces.rank_of_two, ending)
    with pytest.raises(RankError) as ended:
        run_ranks(2, body, {"MORE": ""}, timeout=8 if ending == "hangs" else HANGS_S)
    assert str(ended.value).startswith(said) and "the last words of rank 1" in str(ended.value)


def test_every_piece_is_done_within_ten_minutes_and_has_its_own_name():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert all(piece.limit_s < 600 for piece in PIECES)


def test_pieces_are_chosen_by_name_in_their_own_order():
    assert [piece.name for piece in chosen(["ranges", "te-split"])] == ["te-split", "ranges"]
    assert chosen([]) == list(PIECES)
    with pytest.raises(ValueError, match="no piece 'rangs'"):
        chosen(["rangs"])


def test_a_piece_for_more_gpus_than_there_are_says_so():
    piece = gpu_pieces.piece("passes", gpus=4)
    assert lacking(piece, ONE_GPU) == "takes 4 GPUs or more; found 1"
    assert lacking(piece, Setting(False, 4)) == lacking(piece, ON_CPU) == ""


@pytest.mark.parametrize("gpus", [4, 5, 8, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_take_four_gpus_or_eight(name, gpus):
    layout = layout_of(name, gpus, norms=True)
    assert layout.world == (8 if gpus >= 8 else 4)
    assert ("--sequence-parallel" in layout.flags) == (layout.tensor == 2)
    assert layout.pipeline >= 2
    without = layout_of(name, gpus, norms=False)
    assert "--sequence-parallel" not in without.flags
    assert bool(without.note) == (layout != without or bool(layout.note))


# The program


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict:
    found = {"missing": "", "gpus": 1, "device": "NVIDIA H200", "shown": {"device": "NVIDIA H200", "GPUs": "1"}}
    monkeypatch.setattr(program, "_facts", lambda: found)
    return found


def test_one_that_fails_stops_no_other_and_a_later_run_keeps_what_it_does_not_run(tmp_path, machine, capsys):
    pieces = [gpu_pieces.piece("raises"), gpu_pieces.piece("passes", "first"), gpu_pieces.piece("skips", gpus=8)]
    output = tmp_path / "report.md"
    assert program.main(["--output", str(output)], pieces) == 1
    page = output.read_text()
    assert "| raises | it raises | **failed**: ValueError: no more rows; see raises.log |" in page
    assert "| passes | it passes | passed |" in page and "| first | False | as promised |" in page
    assert "| skips | it skips | skipped: takes 8 GPUs or more; found 1 |" in page
    again = [pieces[0], gpu_pieces.piece("passes", "second"), pieces[2]]
    assert program.main(["--output", str(output), "passes"], again) == 0
    assert output.read_text().replace("second", "first").split("## raises")[1] == page.split("## raises")[1]
    kept = json.loads(output.with_suffix(".json").read_text())["pieces"]
    assert [kept[name]["result"] for name in ("raises", "passes", "skips")] == ["failed", "passed", "skipped"]
    assert kept["passes"]["rows"][0]["what"] == "second"
    assert "raises: failed after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "there", "said"),
    [
        (["nope"], {}, "there is no piece 'nope'; --list says which there are"),
        (["--output", "report.txt"], {}, "--output report.txt must end in .md; the results go beside it"),
        (["--try-on-cpu"], {}, "--try-on-cpu is for machines without a GPU"),
        ([], {"gpus": 0}, "there is no GPU here; --try-on-cpu tries the steps"),
        ([], {"missing": "python has no torch; set PYTHON"}, "python has no torch; set PYTHON"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(machine, capsys, given, there, said):
    machine.update(there)
    with pytest.raises(SystemExit) as leaving:
        program.main(given, [gpu_pieces.piece("passes", "never")])
    errors = capsys.readouterr().err
    assert leaving.value.code == 2
    assert said in errors and errors.startswith("run_gpu_tests.sh: error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("lacks", ["torch", "setuptools", "megatron.core"])
def test_a_python_that_lacks_something_is_reported(monkeypatch, lacks):
    found = needs.find_spec
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == lacks else found(name))
    assert needs.missing().startswith(f"{sys.executable} has no {lacks}; set PYTHON to a Python")
    monkeypatch.undo()
    assert needs.missing() == ""


def test_a_report_is_named_after_its_device():
    assert program.folder_of("NVIDIA H100 80GB HBM3") == Path("data/nvidia-h100-80gb-hbm3")


# The report


def test_a_report_lists_every_piece_and_a_failure_stands_out():
    pieces = [gpu_pieces.piece("passes"), gpu_pieces.piece("faulty"), gpu_pieces.piece("sleeps")]
    rows = [{"a": 1.23456, FAULT: ""}, {"b": "x | y\nz", FAULT: "wrong"}, {"b": "none", FAULT: None}]
    stamp = {"date": "2000-01-01", "commit": "abc"}
    found = report.merged({}, {"torch": "2.11"}, {"faulty": Outcome(Result.FAILED, "why", 61.4, rows)}, stamp)
    page = report.page(found, pieces, tried=False)
    assert "| torch | 2.11 |" in page
    assert "| passes | it passes | not run |  |  |" in page
    assert "| faulty | it faulty | **failed**: why | 61 | 2000-01-01, abc |" in page
    assert "| a | b | result |\n| --- | --- | --- |\n| 1.235 |  | as promised |\n" in page
    assert "|  | x \\| y z | **wrong** |\n|  | none | left out" in page
    assert "CPU" not in page
    assert "nothing of GPUs" in report.page(found, pieces, tried=True)


# What is made of figures


def trained(**changed: object) -> SimpleNamespace:
    return SimpleNamespace(**({"losses": [4.0, 3.0], "norms": [1.0, 2.0], "gradients": {"w": "a", "v": "b"}} | changed))


@pytest.mark.parametrize(
    ("changed", "to_the_bit", "fault"),
    [
        ({}, True, ""),
        ({"losses": [4.0, 3.00001]}, True, ""),
        ({"losses": [4.0, 3.001]}, False, "losses differ from stock's by 0.00033 of them"),
        ({"losses": [4.0, math.nan]}, False, "losses differ from stock's by nan"),
        ({"norms": [1.0, 2.1]}, False, "norms differ from stock's by 0.05 of them"),
        ({"losses": [4.0]}, False, "1 losses and 2 norms in 2 iterations"),
        ({"gradients": {"w": "a", "v": "c"}}, True, "gradients differ, that of v"),
        ({"gradients": {"w": "a", "v": "c"}}, False, ""),
        ({"gradients": {"w": "a", "v": "b", "u": "d"}}, True, "gradients differ, that of more names"),
    ],
)
def test_jobs_are_compared_to_the_bit_where_stock_repeats_itself_so(changed, to_the_bit, fault):
    row = comparing.compared(trained(**changed), trained(), 2, comparing.FP32, to_the_bit=to_the_bit)
    assert row[FAULT].startswith(fault) and bool(row[FAULT]) == bool(fault)


def spans_of(schedule, costs, stretch: float = 1.0) -> list[list[Span]]:
    timed = simulate(schedule, costs)
    return [
        [
            Span(Action(work.kind, work.stage, work.microbatch), 7 + stretch * start, 7 + stretch * end)
            for work, start, end in zip(*row, strict=True)
        ]
        for row in zip(schedule.order, timed.start, timed.end, strict=True)
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "v-half"])
def test_passes_at_the_simulated_times_are_not_off(name):
    schedule = plan(Request(name, 4, 8))
    costs = Costs(1.0, 1.1, 0.75, 0.05).on(schedule.placement)
    exact = spans_of(schedule, costs)
    figures = against_the_simulator(schedule, [exact] * 3)
    assert figures["starts off by, % of the iteration"] == pytest.approx(0, abs=1e-6)
    assert figures["iteration off by, %"] == pytest.approx(0, abs=1e-6)
    assert measured_costs(schedule, [exact]).comm == pytest.approx(0.05)


def test_passes_that_come_late_are_off_by_as_much():
    schedule = plan(Request("1f1b", 4, 8))
    exact = spans_of(schedule, Costs(1.0, 1.0, 1.0).on(schedule.placement))
    late = [[Span(s.action, s.began + 3.3 * (s.began > 7), s.ended + 3.3) for s in row] for row in exact]
    late[0][0] = exact[0][0]
    figures = against_the_simulator(schedule, [late])
    assert figures["iteration off by, %"] == pytest.approx(100 * 3.3 / figures["simulated, ms"] * 1e3, rel=0.2)
    assert figures["starts off by, % of the iteration"] > 3


def test_a_rank_that_did_other_passes_is_no_measurement():
    schedule = plan(Request("1f1b", 2, 2))
    spans = spans_of(schedule, Costs().on(schedule.placement))
    spans[1][0] = spans[1][0]._replace(action=Action(Kind.F, 1, 1))
    with pytest.raises(ValueError, match="rank 1 did other passes than planned"):
        against_the_simulator(schedule, [spans])


# The script


def test_the_list_names_every_piece_and_how_many_gpus_it_takes():
    listed = script("--list")
    assert listed.returncode == 0
    lines = listed.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[piece.name, str(piece.gpus)] for piece in PIECES]


def test_a_missing_python_is_reported():
    ended = script(PYTHON="/no/python")
    assert ended.returncode == 2
    assert ended.stderr == (
        "run_gpu_tests.sh: error: there is no Python /no/python; set PYTHON to one that has torch and megatron-core\n"
    )


def test_a_piece_is_tried_on_the_cpu_without_what_a_gpu_machine_may_lack(tmp_path):
    """Real training under torch's profiler, in a Python without numba, click, rich, psutil and pytest."""
    for name in ("numba", "click", "rich", "psutil", "pytest"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('there is no {name} here')\n")
    output = tmp_path / "report.md"
    tried = script("--try-on-cpu", "--output", str(output), "ranges", PYTHONPATH=str(tmp_path))
    log = tmp_path / "report.logs" / "ranges.log"
    assert tried.returncode == 0, tried.stdout + tried.stderr + (log.read_text() if log.exists() else "")
    rows = json.loads(output.with_suffix(".json").read_text())["pieces"]["ranges"]["rows"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(row["named"] == row["actions"] > 0 for row in rows)
    assert "tried on a CPU" in output.read_text()


@pytest.mark.full_matrix
def test_fp8_is_tried_on_the_cpu_with_transformer_engines_own_python(tmp_path):
    engine = ROOT / ".venv/transformer_engine" / VERSIONS[-1]
    output, variables = tmp_path / "report.md", {"PYTHONPATH": str(engine), CAPABILITY_VARIABLE: "8.9"}
    tried = script("--try-on-cpu", "--output", str(output), "fp8", **variables)
    assert tried.returncode == 0, tried.stdout + tried.stderr + (tmp_path / "report.logs" / "fp8.log").read_text()
    rows = json.loads(output.with_suffix(".json").read_text())["pieces"]["fp8"]["rows"]
    assert [row["recipe"] for row in rows] == ["tensorwise"] * 3 + ["delayed"] * 3
    assert {row["gradients equal to the bit"] for row in rows} == {"53 of 53"}


@pytest.mark.full_matrix
def test_userbuffers_are_tried_on_the_cpu(tmp_path):
    engine = ROOT / ".venv/transformer_engine" / VERSIONS[-1]
    output = tmp_path / "report.md"
    tried = script("--try-on-cpu", "--output", str(output), "userbuffers", PYTHONPATH=str(engine))
    assert tried.returncode == 0, tried.stdout + tried.stderr
    rows = json.loads(output.with_suffix(".json").read_text())["pieces"]["userbuffers"]["rows"]
    assert [(row["schedule"], row["losses apart"]) for row in rows] == [("zb-1p", 0), ("v-half", 0)]


def test_nothing_that_a_piece_says_breaks_the_page():
    note = "\x1b[2J a | b\nc"
    kept = report.merged({}, {}, {"ranges": Outcome(Result.FAILED, note, 1.0)}, {"date": "today", "commit": "x"})
    line = next(line for line in report.page(kept, PIECES, tried=True).splitlines() if line.startswith("| ranges"))
    assert "**failed**: \\x1b[2J a \\| b c |" in line
