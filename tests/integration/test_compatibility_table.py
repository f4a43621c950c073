"""docs/compatibility.md says what these tests show, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compatibility_table import written
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_table_is_of_the_tests_there_are(tmp_path: Path) -> None:
    collected = tmp_path / "features.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "--nightly",
        "-m",
        "feature",
        "--features-to",
        str(collected),
    ]
    subprocess.run([*command, "tests/integration"], cwd=ROOT, check=True, capture_output=True, timeout=HANGS_S)
    committed = json.loads((ROOT / "docs" / "compatibility.json").read_text())
    identity = ("feature", "schedule", "model", "test")
    assert [[found[key] for key in identity] for found in json.loads(collected.read_text())] == [
        [found[key] for key in identity] for found in committed
    ], "run scripts/run_compatibility.sh"
    assert {found["outcome"] for found in committed} == {"passed"}


def test_the_page_is_written_from_the_results() -> None:
    committed = json.loads((ROOT / "docs" / "compatibility.json").read_text())
    assert (ROOT / "docs" / "compatibility.md").read_text() == written(committed)
