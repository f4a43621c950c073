"""How far a long piece of work is: lines in a log, a bar on a terminal, nothing for what is soon done."""

from __future__ import annotations

import io
import os
import pty
import time

from megatron.schedules.report.progress import shown


def test_a_log_gets_a_line_every_so_often():
    log = io.StringIO()
    with shown("planning v-half", log, every=0.05) as progress:
        progress(0.25)
        progress(0.5)
        deadline = time.monotonic() + 20
        while log.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = log.getvalue().splitlines()
    assert lines[:2] == ["planning v-half: 75 % after 0 s"] * 2


def test_what_is_soon_done_leaves_no_line():
    log = io.StringIO()
    with shown("planning v-half", log) as progress:
        progress(1.0)
    assert log.getvalue() == ""


def test_nobody_is_told_where_there_is_no_stream():
    with shown("planning v-half", None) as progress:
        progress(1.0)


def test_a_terminal_gets_a_bar_that_goes_away():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, shown("planning v-half", terminal) as progress:
        progress(0.5)
        time.sleep(0.3)  # until it is drawn again
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "planning v-half" in drawn
    assert "50 %" in drawn
