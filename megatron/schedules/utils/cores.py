"""Parallel execution of independent jobs on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import whole

THREADS_VARIABLE = "MEGATRON_SCHEDULES_THREADS"


def on_all_cores[T](jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Runs ``jobs`` on :func:`threads` threads and returns their results in order."""
    at_once = min(threads(), len(jobs))
    if at_once <= 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda job: job(), jobs))


def threads() -> int:
    """Number of threads: $MEGATRON_SCHEDULES_THREADS, by default the number of cores available to this process.

    Raises:
        PlanError: if the variable is not a whole number of at least 1.
    """
    given = os.environ.get(THREADS_VARIABLE)
    if not given:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = whole(given)
    if number is None or number < 1:
        raise PlanError(f"${THREADS_VARIABLE} must be a whole number from 1 on, not {given!r}")
    return number
