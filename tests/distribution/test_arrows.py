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
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_are_kept(package: Path) -> None:
    status, output = lint(package)
    assert status == 0, output
    assert "6 kept, 0 broken" in output


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("planning/passes.py", "import torch", "planning is"),
        ("planning/passes.py", "def f():\n    import megatron.core.utils", "planning is"),
        ("planning/passes.py", "from megatron.schedules.runtime import program", "planning is"),
        ("report/__init__.py", "from megatron.schedules.runtime import program", "report draws"),
        ("runtime/program.py", "import megatron.training.training", "runtime carries"),
        ("runtime/program.py", "from megatron.schedules.integration import hooks", "runtime carries"),
        ("cli.py", "import torch", "the command line"),
        ("cli.py", "from megatron.schedules.runtime import program", "the command line"),
    ],
)
def test_a_wrong_import_breaks_its_contract(package: Path, module: str, line: str, contract: str) -> None:
    path = package / "megatron" / "schedules" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    status, output = lint(package)
    assert status != 0
    assert any(shown.startswith(contract) and " BROKEN" in shown for shown in output.splitlines()), output
