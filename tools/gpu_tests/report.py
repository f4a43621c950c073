"""The results of every piece: stored as JSON from run to run, and reported as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.utils.printable import printable
from tools.gpu_tests.pieces import FAULT, Piece, Row


class Result(StrEnum):
    """The end of a piece."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """One run of a piece.

    Args:
        result: how it ended.
        note: why, in a line, where it did not pass.
        seconds: how long it took.
        rows: what it looked at.
    """

    result: Result
    note: str
    seconds: float
    rows: Sequence[Row] = ()


def merged(
    kept: Mapping[str, Any], machine: Mapping[str, str], outcomes: Mapping[str, Outcome], stamp: Mapping[str, str]
) -> dict[str, Any]:
    """Returns ``kept`` with the ``outcomes`` of this run in place of earlier ones of the same pieces.

    Args:
        machine: what it ran on.
        stamp: what tells this run from others, its date and commit.
    """
    pieces = dict(kept.get("pieces", {}))
    for name, outcome in outcomes.items():
        pieces[name] = {**outcome._asdict(), "rows": [*outcome.rows], **stamp}
    return {"machine": dict(machine), "pieces": pieces}


def read(path: Path) -> dict[str, Any]:
    """Reads the results of earlier runs from ``path``; empty without any."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def page(found: Mapping[str, Any], pieces: Sequence[Piece], tried: bool) -> str:
    """Returns the report. ``tried``: on the CPU, to see that the steps work."""
    text = ["# GPU tests" + (", tried on a CPU" if tried else "")]
    if tried:
        text.append("Tiny models over the CPU stand-in and gloo. This shows that the steps work, and nothing of GPUs.")
    text.append("Made by `bash scripts/run_gpu_tests.sh`; the rows are in the JSON file beside this page.")
    text.append(_table(("", "here"), [(name, value) for name, value in found["machine"].items()]))
    text.append("## Pieces")
    rows = [(piece, found["pieces"].get(piece.name)) for piece in pieces]
    heads = ("piece", "what it promises", "result", "seconds", "run")
    text.append(_table(heads, [_piece_cells(piece, kept) for piece, kept in rows]))
    for piece, kept in rows:
        if kept and kept["rows"]:
            text += [f"## {piece.name}", piece.promise + ".", _figures(kept["rows"])]
    return "\n\n".join(text) + "\n"


def _piece_cells(piece: Piece, kept: Mapping[str, Any] | None) -> tuple[str, ...]:
    if kept is None:
        return piece.name, piece.promise, "not run", "", ""
    result = f"**{kept['result']}**" if kept["result"] == Result.FAILED else str(kept["result"])
    note = f": {_cell(kept['note'])}" if kept["note"] else ""
    return piece.name, piece.promise, result + note, f"{kept['seconds']:.0f}", f"{kept['date']}, {kept['commit']}"


def _figures(rows: Sequence[Row]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row if head != FAULT))
    cells = [(*(_cell(row.get(head, "")) for head in heads), _verdict(row[FAULT])) for row in rows]
    return _table((*heads, "result"), cells)


def _verdict(fault: str | None) -> str:
    if fault is None:
        return "left out: something it takes is not installed"
    return f"**{_cell(fault)}**" if fault else "as promised"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(" ".join(str(value).split())).replace("|", "\\|")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
