"""docs/plan.ipynb: its cells run one after another, and show what the text says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "docs" / "plan.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(cells: list[str]) -> list[Any]:
    """Runs the cells in one namespace; the value of each one's last line, as a notebook shows it."""
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        lines = ast.parse(cell).body
        last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
        exec(compile(ast.Module(lines, []), "plan.ipynb", "exec"), names)
        shown.append(None if last is None else eval(compile(ast.Expression(last.value), "plan.ipynb", "eval"), names))
    return shown


def test_every_cell_runs_and_plans_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = [value._repr_svg_() for value in run(CELLS) if hasattr(value, "_repr_svg_")]
    assert len(drawn) == 4 and all(svg.startswith("<svg") for svg in drawn)
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "throughput" in line]) == 6
    bubbles = [float(line.rpartition(" ")[2].rstrip("%")) for line in said if line.startswith("limit")]
    assert len(bubbles) == 4 and bubbles == sorted(bubbles, reverse=True)
    assert (tmp_path / "order.csv").read_text().count("\n") == 4


def test_it_is_kept_without_outputs() -> None:
    """They would be out of date unnoticed; a notebook makes them in seconds."""
    assert NOTEBOOK["nbformat"] == 4
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
