"""The command on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_a_terminal(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What ``megatron-schedules`` shows on a terminal of 80 columns and 256 colours, or as ``environment`` says."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    wanted = {"TERM": "xterm-256color", "COLUMNS": "80", **(environment or {})}
    command = [sys.executable, "-m", "megatron.schedules", *arguments]
    process = subprocess.Popen(command, stdout=theirs, cwd=ROOT, env={**kept, **wanted})
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # how a terminal says that its other side is closed
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()
