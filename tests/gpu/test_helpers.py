"""What the GPU tests are made of, and scripts/run_gpu_tests.sh on a CPU; of GPUs nothing can be shown here."""

from __future__ import annotations

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
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.program import Action
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.simulator import simulate
from tests.gpu import comparing
from tests.gpu.ranks import run_ranks
from tests.gpu.settings import LAYOUTS, layout_of
from tests.gpu.timeline import Span, against_the_simulator, measured_costs
from tests.integration.server import VERSIONS
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_gpu_tests.sh"
NEEDED = "set PYTHON to one that has torch, megatron-core 0.19 and pytest"


def rank_of_two(ending: str) -> str:
    """A rank, of which the second ends otherwise."""
    if os.environ["RANK"] == "1":
        print("the last words of rank 1", flush=True)
        if ending == "raises":
            raise ValueError("not today")
        if ending == "dies":
            os._exit(3)
        if ending == "hangs":
            time.sleep(3600)
    return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {os.environ['MORE']}"


@pytest.mark.job
def test_ranks_give_their_results_in_order_and_keep_their_environment_to_themselves():
    body = partial(rank_of_two, "ends well")
    assert run_ranks(2, body, {"MORE": "x", "RANKS": "2"}, timeout=HANGS_S) == ["0 of 2 x", "1 of 2 x"]
    assert "MORE" not in os.environ


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raises", "rank 1: ValueError: not today"),
        ("dies", "rank 1: it died without a word"),
        ("hangs", "ranks [1] are not done in time"),
    ],
)
def test_a_rank_that_does_not_end_well_ends_the_job_and_is_heard(ending, said):
    body = partial(rank_of_two, ending)
    with pytest.raises(RankError) as ended:
        run_ranks(2, body, {"MORE": ""}, timeout=8 if ending == "hangs" else HANGS_S)
    assert str(ended.value).startswith(said) and "the last words of rank 1" in str(ended.value)


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
    _, found = comparing.compared(trained(**changed), trained(), 2, comparing.FP32, to_the_bit=to_the_bit)
    assert found.startswith(fault) and bool(found) == bool(fault)


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
    costs = Costs.of(1.0, 1.1, 0.75, 0.05).on(schedule.placement)
    exact = spans_of(schedule, costs)
    figures = against_the_simulator(schedule, [exact] * 3)
    assert figures["starts off by, % of the iteration"] == pytest.approx(0, abs=1e-6)
    assert figures["iteration off by, %"] == pytest.approx(0, abs=1e-6)
    assert measured_costs(schedule, [exact]).comm == pytest.approx(0.05)


def test_passes_that_come_late_are_off_by_as_much():
    schedule = plan(Request("1f1b", 4, 8))
    exact = spans_of(schedule, Costs.of(1.0, 1.0, 1.0).on(schedule.placement))
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


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, env=variables, timeout=500)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("python", "said"),
    [
        (
            "/no/python",
            "there is no Python /no/python; set PYTHON to one that has torch, megatron-core 0.19 and pytest",
        ),
        (sys.executable, "there is no GPU here; --try-on-cpu tries the steps"),
    ],
)
def test_where_nothing_can_be_tested_the_script_says_so_in_a_line(python: str, said: str) -> None:
    ended = script(PYTHON=python)
    assert (ended.returncode, ended.stderr) == (2, f"run_gpu_tests.sh: error: {said}\n")


def test_a_python_that_lacks_something_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('there is no torch here')\n")
    ended = script(PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr == (
        f"run_gpu_tests.sh: error: {sys.executable} lacks something (ModuleNotFoundError: there is no torch here); "
        f"{NEEDED}\n"
    )


@pytest.mark.nightly
def test_a_gpu_test_is_tried_on_the_cpu_without_what_a_gpu_machine_may_lack(tmp_path: Path) -> None:
    """Real training under torch's profiler, in a Python without numba, click, rich and psutil."""
    for name in ("numba", "click", "rich", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('there is no {name} here')\n")
    tried = script("--try-on-cpu", "-k", "ranges", PYTHONPATH=str(tmp_path))
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "1 passed, 2 skipped" in tried.stdout and "rank 1: names: " in tried.stdout


@pytest.mark.nightly
@pytest.mark.nightly
@pytest.mark.parametrize(("chosen", "passed"), [("fp8", 8), ("userbuffers", 2), ("te_linears", 1)])
def test_what_needs_transformer_engine_is_tried_on_the_cpu(chosen: str, passed: int) -> None:
    engine = ROOT / ".venv/transformer_engine" / VERSIONS[-1]
    variables = {"PYTHONPATH": str(engine), CAPABILITY_VARIABLE: "8.9"}
    tried = script("--try-on-cpu", "-k", chosen, **variables)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert f"{passed} passed" in tried.stdout
