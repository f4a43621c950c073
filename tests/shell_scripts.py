"""The shell scripts of this repository, run in a copy of it where every program they start is a stub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "megatron", "scripts", "tests", "tools")
PATTERN = re.compile(rb"#!.*\b(?:ba|da|k)?sh\b")

# Runs a command where bash takes it for an expression. An array without a value would end that early, by set -u.
HOSTILE = "PATH[$(marker)]"
QUOTED = r"PATH\[\$\(marker\)\]"  # as an error shows it

_STUB = """#!/bin/sh
echo "${0##*/} $*" >>"$STUBS/started"
case ${0##*/} in
  scontrol) echo node1 ;;
  *) echo "${STUB_SAYS-3}" ;;
esac
eval "${STUB_RUNS-}"
"""
_PROGRAMS = ("sbatch", "srun", "scontrol", "apt-get", "chromium", "marker", "python")
_IN_VENV = ("python", "pip", "ruff", "mypy", "lint-imports", "megatron-schedules")


def shell_files() -> list[Path]:
    """Every file of this repository that bash or sh runs or sources."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if _is_shell(path))


def commands() -> list[Path]:
    """The scripts that are called from a terminal: all of scripts/ that are not sourced, and the sweep."""
    own = [path for path in (ROOT / "scripts").iterdir() if path.suffix == ".sh" and path.name[0] != "_"]
    return [*sorted(own), ROOT / "examples" / "slurm" / "sweep.sh"]


def python_commands() -> list[list[str]]:
    """The Python programs that people call, as arguments of ``python``: files, and packages that run."""
    files = [path for folder in ("scripts", "tools") for path in (ROOT / folder).glob("*.py") if path.name[0] != "_"]
    files.append(ROOT / "benchmarks" / "emulate_run.py")
    runs = [path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("__main__.py")]
    packages = [path.parent.relative_to(ROOT).parts for path in runs]
    found = [[str(path.relative_to(ROOT))] for path in files] + [["-m", ".".join(parts)] for parts in packages]
    return sorted([*found, ["-m", "benchmarks.planning"]])


def _is_shell(path: Path) -> bool:
    if path.suffix in (".sh", ".bash", ".sbatch"):
        return True
    with path.open("rb") as file:
        return PATTERN.match(file.readline(200)) is not None


class Checkout:
    """A copy of the shell scripts, with stubs for the programs that they start."""

    def __init__(self, folder: Path) -> None:
        self.root, self.stubs = folder / "checkout", folder / "stubs"
        for path in shell_files():
            copy = self.root / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        for name in ("pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        for place, names in ((self.stubs, _PROGRAMS), (self.root / ".venv" / "bin", _IN_VENV)):
            place.mkdir(parents=True)
            for name in names:
                self.add(place / name)

    def add(self, program: Path) -> None:
        """A stub that notes that it was started, prints $STUB_SAYS and runs $STUB_RUNS."""
        program.write_text(_STUB)
        program.chmod(0o755)

    def run(self, script: str, *arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
        """The script, in an environment that holds what a job of SLURM needs, and ``environment``; nothing else."""
        (self.stubs / "started").unlink(missing_ok=True)
        given = {
            "PATH": f"{self.stubs}:{os.defpath}",
            "HOME": self.stubs,
            "STUBS": self.stubs,
            "PYTHON": self.stubs / "python",
            "GPUS_PER_NODE": 8,
            "LOGS": self.stubs / "logs",
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "",
            "RUN": self.stubs / "run",
            "SWEEP": self.stubs / "sweep",
            "SLURM_ARRAY_TASK_ID": 0,
            "SLURM_JOB_ID": 5,
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NNODES": 1,
            "SLURM_NODEID": 0,
        } | environment
        return subprocess.run(
            ["bash", script, *map(str, arguments)],
            cwd=self.root,
            env={name: str(value) for name, value in given.items()},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HANGS_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def started(self) -> list[str]:
        """The programs that the last run started, a line for each."""
        log = self.stubs / "started"
        return log.read_text().splitlines() if log.exists() else []
