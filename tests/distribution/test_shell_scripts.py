"""Every shell script: passes shellcheck, has a --help that starts nothing, and runs no value of its environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell_scripts import HOSTILE, QUOTED, ROOT, Checkout, commands, python_commands, shell_files

# The arguments that lead each of them to its end. The others are sourced by these.
ARGUMENTS: dict[str, list[str]] = {
    ".ci/run": [],
    "examples/slurm/candidate.sbatch": ["models/3.2B.sh", "runs/sweep"],
    "examples/slurm/collect.sbatch": ["runs/sweep"],
    "examples/slurm/many_nodes.sbatch": ["models/3.2B.sh"],
    "examples/slurm/one_node.sbatch": ["models/3.2B.sh"],
    "examples/slurm/sweep.sh": ["3.2B"],
    "examples/slurm/train.sh": [],
    "scripts/build_docs.sh": [],
    "scripts/benchmark.sh": [],
    "scripts/benchmark_planning.sh": [],
    "scripts/measure_on_gpu.sh": [],
    "scripts/run_compatibility.sh": [],
    "scripts/run_gpu_tests.sh": [],
    "scripts/run_tests.sh": [],
    "scripts/setup.sh": [],
    "scripts/train_demo.sh": [],
}
SOURCED = re.compile(r"examples/slurm/((job|checks)\.sh|models/.*)|scripts/_.*")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_every_script_is_tested_here() -> None:
    names = {str(path.relative_to(ROOT)) for path in shell_files()}
    assert {name for name in names if SOURCED.fullmatch(name) is None} == set(ARGUMENTS)


def test_shellcheck_finds_no_fault_in_any_script() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    checked = subprocess.run(
        [shellcheck, "--external-sources", f"--source-path={ROOT}", *shell_files()], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", [name for name in ARGUMENTS if name != ".ci/run"])
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["first", "--help"]], ids=" ".join)
def test_help_is_the_head_of_the_script_and_starts_nothing(
    checkout: Checkout, script: str, arguments: list[str]
) -> None:
    shutil.rmtree(checkout.root / ".venv")
    before = sorted(checkout.root.rglob("*"))
    shown = checkout.run(script, *arguments)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0] == (ROOT / script).read_text().splitlines()[1].removeprefix("# ")
    assert ROOT / script not in commands() or any(f"bash {script}" in line for line in lines)
    assert not any("#" in line[:1] or "SBATCH" in line for line in lines)
    assert checkout.started() == []
    assert sorted(checkout.root.rglob("*")) == before


@pytest.mark.parametrize("command", python_commands(), ids=" ".join)
def test_help_of_a_python_program_imports_no_torch(tmp_path: Path, command: list[str]) -> None:
    """What takes seconds to import is absent: nothing is started, and help comes at once."""
    (tmp_path / "torch.py").write_text("raise ImportError('help needs no torch')\n")
    shown = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.lower().startswith("usage: ")


def variables(*names: str) -> list[str]:
    """What these scripts may read from the environment: every word in capitals, without the comments."""
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    words = re.findall(r"\b[A-Z][A-Z0-9_]+\b", "\n".join(line for line in lines if not line.lstrip().startswith("#")))
    return sorted(set(words) - {"PATH"})


def together(script: str) -> list[str]:
    """The script, and those that it sources or may source."""
    folder = script.rpartition("/")[0]
    also = [str(path.relative_to(ROOT)) for path in shell_files() if str(path.relative_to(ROOT)).startswith(folder)]
    sourced = [name for name in also if SOURCED.fullmatch(name) is not None]
    return [script, *(sourced if folder == "examples/slurm" or script == "scripts/setup.sh" else [])]


@pytest.mark.nightly
@pytest.mark.parametrize("script", ARGUMENTS)
def test_no_value_from_the_environment_is_run(checkout: Checkout, script: str) -> None:
    checkout.run("scripts/setup.sh")  # once, so that other scripts find it done
    names = variables(*together(script))
    assert names
    for name in names:
        checkout.run(script, *ARGUMENTS[script], **{name: HOSTILE})
        assert "marker" not in " ".join(checkout.started()).replace(HOSTILE, ""), name


@pytest.mark.parametrize("command", commands(), ids=lambda path: path.name)
def test_a_script_works_where_it_is_whatever_cdpath_says(checkout: Checkout, command: Path) -> None:
    elsewhere = checkout.stubs / "elsewhere"
    for name in ("scripts", "examples/slurm"):
        (elsewhere / name).mkdir(parents=True)
    (elsewhere / "scripts" / "setup.sh").write_text("marker\n")
    before = sorted(elsewhere.rglob("*"))
    name = str(command.relative_to(ROOT))
    checkout.run(name, *ARGUMENTS[name], CDPATH=elsewhere)
    assert checkout.started()
    assert "marker" not in " ".join(checkout.started())
    assert sorted(elsewhere.rglob("*")) == before


NUMBERS = {
    "examples/slurm/candidate.sbatch": {
        "GPUS_PER_NODE",
        "ITERATIONS",
        "MASTER_PORT",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_JOB_ID",
        "SLURM_NNODES",
    },
    "examples/slurm/one_node.sbatch": {
        "GPUS_PER_NODE",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_NNODES",
        "SLURM_RESTART_COUNT",
        "TRAIN_ITERS",
    },
    "examples/slurm/sweep.sh": {"GPUS", "GPUS_PER_NODE", "PARALLEL_JOBS"},
    "examples/slurm/train.sh": {"GPUS_PER_NODE", "SLURM_NNODES", "SLURM_NODEID"},
}
NOT_NUMBERS = [HOSTILE, "many", "08", "0x8", "1_0", "-1", "1.5", " 8", "1\n2", "\u0663", "9" * 20, "8" * 5000]


@pytest.mark.parametrize(("script", "name"), [(script, name) for script in NUMBERS for name in sorted(NUMBERS[script])])
def test_a_value_that_is_not_a_whole_number_is_refused_in_one_line(checkout: Checkout, script: str, name: str) -> None:
    for bad in NOT_NUMBERS:
        refused = checkout.run(script, *ARGUMENTS[script], **{name: bad})
        assert refused.returncode == 2, bad
        (line,) = refused.stderr.splitlines()
        assert re.search(rf": error: {name}=.* is not a whole number from [01] to \d+; give plain digits", line), bad
        assert len(line) < 200
        assert checkout.started() == [], bad


def test_the_gpus_that_slurm_counts_are_checked_too(checkout: Checkout) -> None:
    refused = checkout.run(
        "examples/slurm/one_node.sbatch", "models/3.2B.sh", GPUS_PER_NODE="", SLURM_GPUS_ON_NODE=HOSTILE
    )
    assert refused.returncode == 2
    assert f"GPUS_PER_NODE={QUOTED} is not a whole number" in refused.stderr
    assert checkout.started() == []


def test_a_sweep_refuses_a_count_that_is_not_one(checkout: Checkout) -> None:
    refused = checkout.run("examples/slurm/sweep.sh", "3.2B", STUB_SAYS=HOSTILE)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.endswith(f"says {QUOTED} and not how many candidates there are")
    assert all(line.startswith("python ") for line in checkout.started())


@pytest.mark.parametrize(
    ("script", "arguments", "setting"),
    [
        ("examples/slurm/sweep.sh", ["mine"], {"MODEL_FILE": "mine.sh"}),
        ("examples/slurm/one_node.sbatch", ["mine.sh"], {}),
    ],
)
def test_a_model_file_is_the_one_here_and_none_on_the_path(
    checkout: Checkout, script: str, arguments: list[str], setting: dict[str, str]
) -> None:
    (checkout.root / "mine.sh").write_text((ROOT / "examples/slurm/models/3.2B.sh").read_text())
    (checkout.stubs / "mine.sh").write_text("marker\n")
    checkout.run(script, *arguments, **setting)
    assert checkout.started()
    assert "marker" not in " ".join(checkout.started())
