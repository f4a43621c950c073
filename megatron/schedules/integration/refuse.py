"""Refusal of a job: one line for all its processes, and exit status 2 for each."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from megatron.schedules.integration.environment import is_first
from megatron.schedules.utils.errors import one_line

# Seconds to wait for a lower rank to print the reason. On a busy machine, import times differ by seconds.
_PATIENCE = 20.0
_LOOK_EVERY = 0.05
_RANKS = ("RANK", "SLURM_PROCID")
_ON_THIS_MACHINE = ("LOCAL_RANK", "SLURM_LOCALID")
# Variables with the same value in all processes of a job, and different values in two jobs on a machine.
_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def refuse(message: str) -> NoReturn:
    """Ends this process with status 2. The first rank prints the reason in one line.

    The other ranks end after it, because a launcher such as torchrun kills all ranks as soon as one has ended. If only
    other ranks refuse, the lowest of them prints the reason.
    """
    if is_first() or not _said_by_another():
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {one_line(message)}\n")
        sys.stderr.flush()
    raise SystemExit(2)


def _said_by_another() -> bool:
    """Waits until the lower ranks have printed the reason and ended; returns False if they continue."""
    lower = _lower_ranks()
    # This may be the first rank on this machine while rank 0 of the job runs on another machine.
    local = next((os.environ[name] for name in _ON_THIS_MACHINE if name in os.environ), "0")
    elsewhere = not lower and local == "0"
    end = time.monotonic() + _PATIENCE + len(lower)  # not all at the same time
    while time.monotonic() < end:
        if not elsewhere and not any(_environment(process) for process in lower):
            return True
        time.sleep(_LOOK_EVERY)
    return False


def _lower_ranks() -> list[Path]:
    """Processes of this job on this machine with a lower rank."""
    own = _environment(Path("/proc/self"))
    rank = _rank(own)
    if rank is None:
        return []
    environments = {process: _environment(process) for process in Path("/proc").glob("[0-9]*")}
    return [
        process
        for process, environment in environments.items()
        if (other := _rank(environment)) is not None
        and other < rank
        and all(environment.get(name) == own.get(name) for name in _OF_A_JOB)
    ]


def _environment(process: Path) -> dict[str, str]:
    """Environment of ``process``; empty if it has ended or belongs to another user."""
    try:
        entries = (process / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _rank(environment: dict[str, str]) -> int | None:
    text = next((environment[name] for name in _RANKS if name in environment), "")
    return int(text) if text.isascii() and text.isdigit() else None
