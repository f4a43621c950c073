"""The import-linter contracts of pyproject.toml bite: each is broken on purpose in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the contracts name Megatron's packages")

ROOT = Path(__file__).parents[2]


def lint(folder: Path) -> tuple[int, str]:
    program = "import sys, importlinter.cli as c; sys.exit(c.lint_imports(no_cache=True, no_logo=True))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("megatron", "benchmarks", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_are_kept(package: Path) -> None:
    status, output = lint(package)
    assert status == 0, output
    assert "4 kept, 0 broken" in output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("schedule/kinds.py", "import torch", "plans, drawings"),
        ("search/tasks.py", "def f():\n    import megatron.core.utils", "plans, drawings"),
        ("cli/commands.py", "import torch", "plans, drawings"),
        ("programs/program.py", "import megatron.training.training", "runtime carries"),
        ("schedule/kinds.py", "from megatron.schedules.programs import program", "rooms import"),
        ("schedule/kinds.py", "from megatron.schedules.search import tasks", "rooms import"),
        ("search/tasks.py", "from megatron.schedules.planner import request", "rooms import"),
        ("report/__init__.py", "from megatron.schedules.programs import program", "rooms import"),
        ("programs/program.py", "from megatron.schedules.integration import hooks", "rooms import"),
        ("cli/commands.py", "from megatron.schedules.runtime import engine", "rooms import"),
        ("schedule/placement.py", "from megatron.schedules.schedule import simulator", "inside a room"),
        ("integration/environment.py", "from megatron.schedules.integration import hooks", "inside a room"),
        ("../../benchmarks/saving_entry.py", "from benchmarks import saving", "inside a room"),
    ],
)
def test_a_wrong_import_breaks_its_contract(package: Path, module: str, line: str, contract: str) -> None:
    path = package / "megatron" / "schedules" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    status, output = lint(package)
    assert status != 0
    assert any(shown.startswith(contract) and " BROKEN" in shown for shown in output.splitlines()), output
