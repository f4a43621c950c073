"""How far a long piece of work is: lines in a log, a bar on a terminal, nothing for what is soon done."""

from __future__ import annotations

import io
import os
import pty
import re
from contextlib import suppress

from megatron.schedules.report.progress_bar import shown
from tests.waiting import until


def test_a_log_gets_a_line_every_so_often():
    log = io.StringIO()
    with shown("planning v-half", log, every=0.05) as progress:
        progress(0.25)
        progress(0.5)
        until(lambda: log.getvalue().count("\n") >= 2, "the second line")
    lines = log.getvalue().splitlines()
    assert all(re.fullmatch(r"planning v-half: 75 % after \d+ s", line) for line in lines[:2]), lines


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
        os.set_blocking(ours, False)
        drawn = bytearray()

        def half() -> bool:
            with suppress(BlockingIOError):
                drawn.extend(os.read(ours, 65536))
            return b"50 %" in drawn

        until(half, "the bar")
    os.close(ours)
    assert b"planning v-half" in drawn
