"""docs/benchmarks.md: short claims with their verdicts, written from the recorded data and from nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS
from benchmarks.parts import Claim, Kept, Part, claims_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_page_is_what_the_recorded_data_give() -> None:
    """`bash scripts/benchmark.sh page` writes it."""
    assert Kept(ROOT / "docs").page(PARTS) == PAGE


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_claim_is_one_line_that_leads_to_its_table_and_command(part: Part) -> None:
    for claim in part.claims(Kept(ROOT / "docs").parts[part.name]["rows"]):
        (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {claim.text} | {claim.found} | "))
        assert f"[{part.name}](#" in line
    section = PAGE.partition(f"\n## {part.title}\n")[2].partition("\n## ")[0]
    assert f"`bash scripts/benchmark.sh {part.name}" in section
    assert "\n| --- | ---: |" in section


def test_a_claim_that_did_not_hold_stands_out() -> None:
    part = Part("p", "A part", lambda quick, say: iter(()), lambda rows: [Claim("This", "1", "not held")], lambda _: "")
    assert claims_table([(part, [])]).splitlines()[-1] == "| This | 1 | **not held** | [p](#a-part) |"


def test_writing_the_page_from_data_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "benchmarks.json", tmp_path / "docs")
    data = json.loads((tmp_path / "docs" / "benchmarks.json").read_text())
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "page"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "wrote docs/benchmarks.md\n")
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == PAGE
    assert json.loads((tmp_path / "docs" / "benchmarks.json").read_text()) == data
