"""Runs the GPU tests and writes a report."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.output_files import write_text
from megatron.schedules.utils.printable import printable
from tools.gpu_tests.pieces import PIECES, Piece, Setting, chosen, lacking
from tools.gpu_tests.report import Outcome, Result, merged, page, read
from tools.gpu_tests.running import run_apart

_PROGRAM = "run_gpu_tests.sh"
_ROOT = Path(__file__).resolve().parents[2]
_TRIED = Path(".benchmark/gpu-steps")


def main(given: Sequence[str], pieces: Sequence[Piece] = PIECES) -> int:
    """Runs the selected pieces; returns the exit status."""
    parser = argparse.ArgumentParser(_PROGRAM, description=__doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="a name from --list; without one, all pieces")
    parser.add_argument("--list", action="store_true", help="list the pieces and exit")
    parser.add_argument("--try-on-cpu", action="store_true", help="run the same steps with tiny models on the CPU")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="the report; results and logs go next to it")
    asked = parser.parse_args(given)
    if asked.list:
        print(listed(pieces))
        return 0
    try:
        todo = chosen(asked.pieces, pieces)
    except ValueError as error:
        _refuse(str(error))
    if asked.output is not None and asked.output.suffix != ".md":
        _refuse(f"--output {asked.output} must end in .md; the results go beside it, ending in .json")
    found = _facts()
    if found["missing"]:
        _refuse(found["missing"])
    setting = Setting(asked.try_on_cpu, found["gpus"])
    if setting.on_cpu and setting.gpus:
        _refuse("--try-on-cpu is for machines without a GPU")
    if not setting.on_cpu and not setting.gpus:
        _refuse("there is no GPU here; --try-on-cpu tries the steps")
    output = asked.output or folder_of(found["device"]) / "gpu-tests.md"
    return _run(todo, pieces, setting, found["shown"], output)


def _run(todo: Sequence[Piece], pieces: Sequence[Piece], setting: Setting, shown: Any, output: Path) -> int:
    stamp = {"date": datetime.date.today().isoformat(), "commit": _commit()}
    results, failed = output.with_suffix(".json"), False
    for piece in todo:
        if why := lacking(piece, setting):
            outcome = Outcome(Result.SKIPPED, why, 0.0)
        else:
            print(f"{piece.name}: {piece.promise}", flush=True)
            outcome = run_apart(piece, setting, output.with_suffix(".logs"))
        said = f"{piece.name}: {outcome.result} after {outcome.seconds:.0f} s {outcome.note}"
        print(printable(said).rstrip(), flush=True)
        failed |= outcome.result is Result.FAILED
        kept = merged(read(results), shown, {piece.name: outcome}, stamp)
        try:
            results.parent.mkdir(parents=True, exist_ok=True)
            write_text(results, json.dumps(kept, indent=1) + "\n")
            write_text(output, page(kept, pieces, setting.on_cpu))
        except OSError as error:
            _refuse(f"cannot write {error.filename}: {error.strerror}")
    print(f"the report is {output}")
    return 1 if failed else 0


def listed(pieces: Sequence[Piece]) -> str:
    """Returns a line for each piece: name, GPUs, limit, promise."""
    width = max(len(piece.name) for piece in pieces)
    return "\n".join(
        f"{piece.name:{width}}  {piece.gpus} GPU{'s' if piece.gpus > 1 else ' '}  {piece.limit_s:3.0f} s  "
        f"{piece.promise}"
        for piece in pieces
    )


def folder_of(device: str) -> Path:
    """Returns the folder for figures of ``device``, as ``scripts/measure_on_gpu.sh`` does; without one, of a trial."""
    return Path("data", re.sub(r"[^a-z0-9]+", "-", device.lower())) if device else _TRIED


def _facts() -> dict[str, Any]:
    asked = subprocess.run([sys.executable, "-m", "tools.gpu_tests.needs"], capture_output=True, text=True, cwd=_ROOT)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"missing": f"{sys.executable} cannot import torch: {reason}"}
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def _commit() -> str:
    """Returns the commit under test, or that it is unknown: a copy of the files has no history."""
    try:
        asked = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown"


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(f"{_PROGRAM}: error: {one_line(why)}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
