"""scripts/_find_python.sh: finds a Python that works among ones that do not, and says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "_find_python.sh"
REFUSING_SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'


class Machine:
    """A made-up machine: a home and a PATH whose Pythons are scripts that answer as they are told to."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.path = folder / "bin"
        self.path.mkdir(parents=True)
        for tool in ("timeout", "cat", "awk"):
            found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
            (self.path / tool).symlink_to(found)

    def add(self, place: Path, minor: int | None) -> Path:
        """A Python 3.``minor`` at ``place``; with None one that refuses to run."""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\n{REFUSING_SHIM if minor is None else f'echo {minor}'}\n")
        place.chmod(0o755)
        return place

    def find(self, **environment: str) -> tuple[int, str, str]:
        # The folders that are searched on every machine must not show this one's Pythons.
        program = f"source '{SCRIPT}'; find_python"
        done = subprocess.run(
            ["/bin/bash", "-c", program],
            env={"HOME": str(self.home), "PATH": str(self.path), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout.strip(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_skips_an_old_python3_and_a_shim_that_refuses(machine: Machine) -> None:
    machine.add(machine.path / "python3", 11)
    machine.add(machine.path / "python3.12", None)
    wanted = machine.add(machine.home / ".pyenv/versions/3.12.4/bin/python3", 12)
    machine.add(machine.home / ".pyenv/versions/3.11.7/bin/python3", 11)
    assert machine.find()[:2] == (0, str(wanted))


@pytest.mark.parametrize(
    "place",
    [
        "miniconda3/bin/python3",
        "miniconda3/envs/train/bin/python3",
        ".local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3",
    ],
)
def test_looks_where_conda_and_uv_keep_theirs(machine: Machine, place: str) -> None:
    wanted = machine.add(machine.home / place, 12)
    assert machine.find()[:2] == (0, str(wanted))


def test_looks_beside_conda_and_in_pyenvs_root(machine: Machine, tmp_path: Path) -> None:
    conda = machine.add(tmp_path / "conda/bin/conda", None)
    wanted = machine.add(tmp_path / "conda/bin/python3", 12)
    assert machine.find(CONDA_EXE=str(conda))[1] == str(wanted)
    wanted = machine.add(tmp_path / "pyenv/versions/3.12.0/bin/python3", 12)
    assert machine.find(PYENV_ROOT=str(tmp_path / "pyenv"))[1] == str(wanted)


@pytest.mark.parametrize("said", ["PATH[$(marker)]", "12 13", "\n", "012", "9" * 20])
def test_does_not_count_with_what_is_no_version(machine: Machine, said: str) -> None:
    shim = machine.add(machine.path / "python3.12", 12)
    shim.write_text(f"#!/bin/sh\necho '{said}'\n")
    marked = machine.add(machine.path / "marker", None)
    marked.write_text(f"#!/bin/sh\ncat </dev/null >{machine.path / 'ran'}\n")
    wanted = machine.add(machine.home / ".pyenv/versions/3.12.4/bin/python3", 12)
    status, found, error = machine.find()
    assert (status, error) == (0, "")
    assert found in {str(wanted)} | set(_of_this_machine())
    assert not (machine.path / "ran").exists()


def test_prefers_the_python_that_has_every_wheel(machine: Machine) -> None:
    newest = machine.add(machine.path / "python3", 14)
    assert machine.find()[1] in {str(newest)} | set(_of_this_machine())
    middle = machine.add(machine.path / "python3.13", 13)
    if not _of_this_machine():
        assert machine.find()[1] == str(middle)
    wanted = machine.add(machine.home / ".pyenv/versions/3.12.4/bin/python3", 12)
    assert machine.find()[1] in {str(wanted)} | set(_of_this_machine())


def test_says_what_to_install(machine: Machine) -> None:
    if _of_this_machine():
        pytest.skip("this machine has a Python 3.12 in a folder that is always searched")
    old = machine.add(machine.path / "python3", 9)
    broken = machine.add(machine.path / "python", None)
    status, output, error = machine.find()
    assert (status, output) == (1, "")
    assert "no Python 3.12 or newer found" in error
    assert f"{old} is Python 3.9" in error
    assert f"{broken} does not run" in error
    assert "apt-get install python3.12 python3.12-venv" in error


def test_a_python_that_is_named_is_the_only_one(machine: Machine) -> None:
    old = machine.add(machine.path / "old", 11)
    machine.add(machine.path / "python3.12", 12)
    status, output, error = machine.find(PYTHON="old")
    assert (status, output) == (1, "")
    assert "PYTHON=old is not a Python 3.12" in error
    assert f"{old} is Python 3.11" in error
    assert machine.find(PYTHON=sys.executable)[:2] == (0, sys.executable)


def _of_this_machine() -> list[str]:
    return [str(path) for folder in ("/usr/local/bin", "/usr/bin") for path in Path(folder).glob("python3.1[2-9]")]
