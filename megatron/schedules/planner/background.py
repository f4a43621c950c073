"""Replans in a background process while a job runs, on one core and at the lowest priority.

The process runs :func:`main`. Its input is a pickled request and plan. Its output is a proposal, or the reason why
there is none.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from typing import IO

from megatron.schedules.planner.replanning import Proposal, propose
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.child_processes import isolated_command, isolated_environment
from megatron.schedules.utils.cores import THREADS_VARIABLE
from megatron.schedules.utils.errors import one_line

_NICENESS = 19


class BackgroundPlanError(RuntimeError):
    """Error when replanning fails; the message says why, in one line."""


class BackgroundPlan:
    """A background process that replans.

    Args:
        request: see :func:`.replanning.propose`.
        current: see :func:`.replanning.propose`.
        seconds: time limit, in seconds.
    """

    def __init__(self, request: Request, current: Schedule, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process has ended
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with tempfile.TemporaryFile() as asked:  # no pipe, so that writing never blocks until the process reads
            pickle.dump((request, current), asked)
            asked.seek(0)
            self._process = subprocess.Popen(
                isolated_command(__name__),
                stdin=asked,
                stdout=self._said,
                stderr=self._complaints,
                env=isolated_environment() | {THREADS_VARIABLE: "1", "NUMBA_NUM_THREADS": "1"},
            )
        self._ending = weakref.finalize(self, _end, self._process)

    def poll(self) -> Proposal | None:
        """Returns the proposal, or None while it is being made. Does not block.

        Raises:
            BackgroundPlanError: if there will be no proposal.
        """
        status = self._process.poll()
        if status is None and time.monotonic() < self._until:
            return None
        self._ending()
        if status is None:
            raise BackgroundPlanError("no plan was found in time")
        said = _all_of(self._said).splitlines()
        with suppress(ValueError, LookupError, TypeError):
            answer = json.loads(said[-1])
            if "error" in answer:
                raise BackgroundPlanError(str(answer["error"]))
            return Proposal.from_text(said[-1])
        complaint = _all_of(self._complaints).strip().splitlines()[-1:]
        raise BackgroundPlanError(
            one_line(f"the process that plans ended with {status}{': ' if complaint else ''}{''.join(complaint)}")
        )

    def close(self) -> None:
        """Ends the process, even if it is not finished."""
        self._ending()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _all_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def main() -> None:
    """Entry point of the background process."""
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(OSError, AttributeError):
        # Ranks may have a high scheduling priority, which child processes inherit.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    request, current = pickle.load(sys.stdin.buffer)
    try:
        answer = propose(request, current).to_text()
    except Exception as error:
        answer = json.dumps({"error": one_line(f"{error}") or type(error).__name__})
    sys.stdout.write(answer + "\n")
