"""Puts planted faults into a copy of the repository, one after another, and says which the tests notice.

    python scripts/run_mutants.py                                       all faults, the tests of the day: half an hour
    python scripts/run_mutants.py --fault "a V" tests/schedule          faults whose name has these words
    python scripts/run_mutants.py -- tests/planner -m pure

Other arguments go to pytest. Without any, the pure tests beside the code come first, then jobs, then all pure tests.
The faults are in tests/mutants/mutants.toml. Ends with 1 if a fault is not noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "mutants" / "mutants.toml"


class Fault(NamedTuple):
    """A planted fault.

    Args:
        name: what is wrong.
        file: path in the package.
        tests: file of the tests that are most likely to notice it.
        old: text that occurs once in it.
        new: what takes its place.
    """

    name: str
    file: str
    tests: str
    old: str
    new: str

    @property
    def likely(self) -> list[list[str]]:
        """Arguments of pytest for the tests of the day, those first that are most likely to notice the fault."""
        return [[self.tests], ["-m", "pure"], ["-m", "job"]]

    def put_into(self, root: Path) -> None:
        """Changes the file under ``root``."""
        path = root / "megatron" / "schedules" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: its text is {text.count(self.old)} times in {self.file} instead of once")
        path.write_text(text.replace(self.old, self.new))


def faults() -> list[Fault]:
    """Reads all faults."""
    return [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["mutant"]]


def copied(to: Path) -> None:
    """Copies what git tracks, and lends it this repository's environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    (to / ".venv").symlink_to(ROOT / ".venv")


def noticed(fault: Fault, root: Path, arguments: list[str], seconds: float) -> str | None:
    """Returns the first test that fails with the fault; None if none does."""
    runs = [arguments] if arguments else fault.likely
    return next(filter(None, (first_failure(fault, root, run, seconds) for run in runs)), None)


def first_failure(fault: Fault, root: Path, arguments: list[str], seconds: float) -> str | None:
    """Returns the first test of a run that fails with the fault; None if none does. One that takes too long fails."""
    path = root / "megatron" / "schedules" / fault.file
    before = path.read_text()
    fault.put_into(root)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not over after {seconds:g} s"
    finally:
        path.write_text(before)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode > 2 or failed is None:
        raise SystemExit(f"pytest ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def main() -> None:
    """Runs the tests with each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", default=[], help="only faults whose name has these words")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one run; default %(default)s")
    given, arguments = parser.parse_known_args()
    chosen = [fault for fault in faults() if not given.fault or any(words in fault.name for words in given.fault)]
    if not chosen:
        parser.error(f"--fault: no fault has {' or '.join(given.fault)} in its name")
    left = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copied(root)
        for number, fault in enumerate(chosen, 1):
            begun = time.monotonic()
            test = noticed(fault, root, [word for word in arguments if word != "--"], given.timeout)
            said = "NOT NOTICED" if test is None else f"noticed by {test}"
            print(
                f"{number}/{len(chosen)} {fault.file}: {fault.name}: {said} ({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
            left += [fault.name] * (test is None)
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults are noticed")
    raise SystemExit(bool(left))


if __name__ == "__main__":
    main()
