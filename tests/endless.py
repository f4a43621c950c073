"""Work that never ends and never lets go of the interpreter's lock, and who is still doing it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

FOLDER_VARIABLE = "ENDLESS_WORK_NOTES"


def endless(*_: object) -> None:
    """Notes the process that does it, then stays within one call of compiled code."""
    Path(os.environ[FOLDER_VARIABLE], str(os.getpid())).touch()
    re.match("(a+)+b", "a" * 200)


def workers(folder: Path) -> list[int]:
    """The processes that have begun."""
    return [int(note.name) for note in folder.iterdir()]


def running(processes: Iterable[int]) -> list[int]:
    """Those of ``processes`` that have not ended."""
    return [process for process in processes if _runs(process)]


def _runs(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def all_end(processes: Iterable[int], seconds: float = 60) -> bool:
    """Whether all of ``processes`` end within so many seconds."""
    processes, until = list(processes), time.monotonic() + seconds
    while running(processes) and time.monotonic() < until:
        time.sleep(0.05)
    return not running(processes)


def three(quick: bool, say: object) -> Iterator[int]:
    """Rows of a benchmark: one, at once."""
    yield 3
