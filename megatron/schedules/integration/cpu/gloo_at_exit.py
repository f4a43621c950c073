"""Waits until gloo's threads are idle before the interpreter shuts down.

A thread that ran a collective frees its tensors after the collective has ended. For a tensor that Python references,
this needs the interpreter's lock. Requesting the lock during shutdown aborts the process with "terminate called without
an active exception" (torch 2.13, Python 3.12). Stock Megatron ends without destroying its process groups, so on a busy
machine a rank may crash after all its work is done.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_THREADS = "pt_gloo_runloop"
_PAUSE_S, _AT_MOST_S = 0.01, 5.0


def wait_at_exit() -> None:
    """Makes this process wait at exit until gloo's threads are idle. Linux only."""
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Waits, at most some seconds, until no gloo thread runs during a pause.

    The pause releases the interpreter's lock, so a thread that waits for it runs and is detected.
    """
    deadline = time.monotonic() + _AT_MOST_S
    before, now = None, _activity()
    while before != now and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        before, now = now, _activity()


def _activity() -> dict[str, tuple[object, ...]]:
    """Returns values that change when a gloo thread runs: its context switches and its running time."""
    activity: dict[str, tuple[object, ...]] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread has ended meanwhile
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _THREADS:
            running = time.monotonic() if status["State"].startswith("R") else None
            activity[task.name] = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"], running
    return activity
