"""Lets gloo's threads come to rest before the interpreter is torn down.

A thread that carried out a collective frees its tensors after the collective has ended. Where Python knows the tensor
that takes the interpreter's lock, and asking for it during the teardown aborts the process with "terminate called
without an active exception" (torch 2.13, Python 3.12). Stock Megatron ends without destroying its process groups, so
on a busy machine a rank may die of it when all its work is done.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_THREADS = "pt_gloo_runloop"
_PAUSE_S, _AT_MOST_S = 0.01, 5.0


def wait_at_exit() -> None:
    """When this process ends, however it ends, first wait until gloo's threads do nothing. Heeded on Linux only."""
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Wait, some seconds at most, until no thread of gloo's is switched to during a pause.

    The pause gives up the interpreter's lock, so a thread that waits for it goes on, and shows.
    """
    deadline = time.monotonic() + _AT_MOST_S
    before, now = None, _activity()
    while before != now and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        before, now = now, _activity()


def _activity() -> dict[str, tuple[object, ...]]:
    """For each of gloo's threads what changes when it does something: its switches, and the time while it runs."""
    found: dict[str, tuple[object, ...]] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _THREADS:
            running = time.monotonic() if status["State"].startswith("R") else None
            found[task.name] = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"], running
    return found
