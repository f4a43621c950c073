"""Figures of README.md are those that the commands beside them print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.job.flags import SHARED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEMO = (ROOT / "docs" / "train_demo.txt").read_text()
SCRIPT = (ROOT / "scripts" / "train_demo.sh").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found


def row(text: str, title: str) -> list[str]:
    """The numbers of the row of the demo's table that begins with ``title``."""
    (line,) = (line for line in text.splitlines() if line.startswith(title))
    return re.findall(r"\d+\.\d+", line.removeprefix(title))


def test_the_end_of_the_demo_is_quoted_as_the_demo_printed_it() -> None:
    assert block("text") in DEMO


@pytest.mark.parametrize("said", re.findall(r'\bsay "(.*)"$', SCRIPT, re.MULTILINE))
def test_the_recorded_demo_says_what_the_script_says(said: str) -> None:
    """Where only values differ. What is left out belongs to a first run, or to a short one."""
    pattern = re.sub(r"\\\$\\\(\\\(.*\\\)\\\)|\\\$\\[({].*?\\[})]|\\\$\w+", ".*", re.escape(said))
    others = ("making the corpus", "drawing the weights", "speed is not compared")
    assert said.startswith(others) or re.search(f"^demo: {pattern}$", DEMO, re.MULTILINE)


def test_the_plans_of_the_demo_are_those_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.sh"  # in fp32, as on a CPU
    model.write_text("".join(line for line in SCRIPT.splitlines(keepends=True) if "--bf16" not in line))
    size = ["--pipeline-size", "4", "--microbatches", "8", "--model", f"{model} --global-batch-size 16"]
    assert main(["compare", "--schedule", "v-half", "--schedule", "1f1b", *size, "--format", "json"]) == 0
    half, base = json.loads(capsys.readouterr().out)
    bubbles = [f"{100 * each['bubble']:.1f}" for each in (half, base)]
    memory = [each["memory_of_1f1b"] for each in (half, base)]
    for text in (DEMO, block("text")):
        assert row(text, "planned bubble") == row(text, "bubble, planned") == bubbles
        planned = [*(f"{100 * each:.1f}" for each in memory), f"{memory[0] / memory[1]:.2f}"]
        assert row(text, "planned peak activation memory, of 1F1B's") == planned
        assert row(text, "iteration time, planned")[2] == f"{(1 - base['bubble']) / (1 - half['bubble']):.2f}"


def test_the_measured_table_is_that_of_the_recorded_benchmark() -> None:
    part = json.loads((ROOT / "docs" / "benchmarks.json").read_text())["emulated"]
    assert "bash scripts/benchmark.sh emulated --pipeline-size 8 --microbatches 16 --costs 1,1.1,0.75 " in README
    measured = {
        f"{each['engine']} {each['schedule']}": (f"{each['speedup_over_stock_1f1b']:.3f}", f"{each['memory']:g}")
        for each in part["rows"]
        if (each["pipeline_size"], each["microbatches"], each["costs"]) == (8, 16, "1,1.1,0.75")
    }
    rows = re.findall(r"^\| ((?:megatron-core|torch|ours) \S.*?) \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    assert len(rows) == 9
    assert {name: measured[name] for name, *_ in rows} == {name: tuple(figures) for name, *figures in rows}


def test_the_page_of_flags_names_every_flag() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    assert [name for name in SHARED if f"\n| `--pipeline-{name}" not in page] == []
