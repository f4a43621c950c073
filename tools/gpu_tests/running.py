"""Runs one piece in separate processes with a time limit, and ends what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from megatron.schedules.utils.child_processes import end_with_parent
from tools.gpu_tests.pieces import FAULT, Piece, Row, Setting, Skipped
from tools.gpu_tests.report import Outcome, Result

_GRACE_S = 2.0


def run_apart(piece: Piece, setting: Setting, folder: Path) -> Outcome:
    """Runs ``piece`` in a new process, with output in ``folder``; returns what it found, however it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    found, log = folder / f"{piece.name}.jsonl", folder / f"{piece.name}.log"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu_tests.running", json.dumps(piece), json.dumps(setting)]
    command += [str(found), str(os.getpid())]
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(piece.limit_s)
            late = process.poll() is None
        finally:
            left = _end_group(process)
    seconds = time.monotonic() - started
    return outcome_of(piece, [json.loads(line) for line in _lines(found)], seconds, late=late, left=left, log=log)


def outcome_of(piece: Piece, told: list[Row], seconds: float, *, late: bool, left: bool, log: Path) -> Outcome:
    """Returns the report of a piece that ``told`` this before it ended."""
    rows = [each["row"] for each in told if "row" in each]
    last = told[-1] if told else {}
    faults = [row[FAULT] for row in rows if row.get(FAULT)]
    if late:
        # However well it went so far: nobody knows what it hung in.
        return Outcome(Result.FAILED, f"not done after {piece.limit_s:.0f} s, and ended; see {log.name}", seconds, rows)
    if "skipped" in last:
        return Outcome(Result.SKIPPED, last["skipped"], seconds, rows)
    if "error" in last:
        return Outcome(Result.FAILED, f"{last['error']}; see {log.name}", seconds, rows)
    if "end" not in last:
        return Outcome(Result.FAILED, f"died without a word; see {log.name}", seconds, rows)
    if faults:
        return Outcome(Result.FAILED, f"{len(faults)} of {len(rows)} rows: {faults[0]}", seconds, rows)
    if not rows:
        return Outcome(Result.FAILED, "looked at nothing", seconds)
    if left:
        return Outcome(Result.FAILED, "left processes behind, which were ended", seconds, rows)
    return Outcome(Result.PASSED, "", seconds, rows)


def _lines(path: Path) -> list[str]:
    """Reads the whole lines of a file whose writer may have been killed."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    """Kills ``process`` and its session; returns whether anything else was still there."""
    left, group = False, process.pid
    if process.poll() is not None:
        end = time.monotonic() + _GRACE_S  # what was told to end may need a moment
        while (left := _alive(group)) and time.monotonic() < end:
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    process.wait()
    return left


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _main(piece: Piece, setting: Setting, found: Path) -> None:
    """Runs the piece in the new process, writing its rows to ``found``."""
    with found.open("a") as file:

        def tell(**what: object) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        try:
            for row in piece.load()(setting):
                print(row, flush=True)
                tell(row=row)
            tell(end=True)
        except Skipped as why:
            tell(skipped=str(why))
        except BaseException as error:
            traceback.print_exc()
            tell(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300])


if __name__ == "__main__":
    end_with_parent(int(sys.argv[4]))
    name, promise, (path, arguments), gpus, limit_s = json.loads(sys.argv[1])
    _main(
        Piece(name, promise, (path, tuple(arguments)), gpus, limit_s),
        Setting(*json.loads(sys.argv[2])),
        Path(sys.argv[3]),
    )
