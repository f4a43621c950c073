"""Inner loops as machine code, compiled once on a machine and kept where plans are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.planning.keeping import code_version, folder, locked, write_whole
from megatron.schedules.planning.list_scheduling import Instance, Policy, list_schedule

_SUMS = "sums.json"
_log = logging.getLogger(__name__)


@cache
def compiled() -> Callable[..., float]:
    """:func:`.list_scheduling.list_schedule`, compiled for arrays, for one signature only."""
    import numba

    ints, floats = numba.int64[::1], numba.float64[::1]
    return kept_code(list_schedule, numba.float64(tasks_type(), ints, floats, policy_type(), ints, floats, ints))


def tasks_type() -> Any:
    """numba's type of tasks on arrays."""
    import numba

    ints, floats, flags = numba.int64[::1], numba.float64[::1], numba.boolean[::1]
    of_tasks = (ints, ints, floats, floats, flags, flags, ints, floats, flags, ints, ints, ints, floats)
    return numba.types.NamedTuple(of_tasks, Instance)


def policy_type() -> Any:
    """numba's type of a policy."""
    import numba

    choices = (numba.int64, numba.boolean, numba.float64, numba.boolean, numba.float64, numba.int64)
    return numba.types.NamedTuple(choices, Policy)


def kept_code(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """``function`` compiled for one signature, or its machine code as it was kept.

    numba keeps its code in files that it trusts. So they are read and written by one process at a time, and only as
    they were written: what has changed since is thrown away, compiled again, and the log says so.
    """
    import numba

    kept = folder() / "compiled" / f"{code_version()[:16]}-numba-{numba.__version__}"
    with locked(kept) as lock:
        if lock is None:
            made: Callable[..., Any] = numba.njit(signature, nogil=True)(function)
            return made
        if kept.exists() and _read_sums(kept) != _sums(kept):
            _log.warning("%s holds machine code other than was put there, or not all of it: compiled anew", kept)
            shutil.rmtree(kept, ignore_errors=True)
        try:
            with _kept_in(kept):
                made = numba.njit(signature, nogil=True, cache=True)(function)
        except OSError:  # a full disk
            made = numba.njit(signature, nogil=True)(function)
        else:
            if _read_sums(kept) != _sums(kept):
                write_whole(kept / _SUMS, json.dumps(_sums(kept)))
        return made


def scheduled(
    tasks: Instance, order: NDArray[np.int64], limits: Sequence[float] | NDArray[np.float64], policy: Policy
) -> tuple[NDArray[np.int64], float]:
    """The order that the compiled function makes of ``order``, and its makespan.

    Args:
        tasks: on arrays.
        order, limits, policy: see :func:`.list_scheduling.list_schedule`.
    """
    found, missing, ready = np.empty_like(order), np.array(tasks.waits), np.zeros(len(order))
    makespan = compiled()(tasks, order, np.asarray(limits, np.float64), policy, missing, ready, found)
    return found, makespan


@contextmanager
def _kept_in(path: Path) -> Iterator[None]:
    """While a function is decorated, numba looks up here where its machine code is kept."""
    import numba.core.config

    config: Any = numba.core.config
    usual, config.CACHE_DIR = config.CACHE_DIR, str(path)
    try:
        yield
    finally:
        config.CACHE_DIR = usual


def _sums(path: Path) -> dict[str, str]:
    """Of every file in ``path`` but the one that holds these."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != _SUMS)
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _read_sums(path: Path) -> object:
    try:
        return json.loads((path / _SUMS).read_text())
    except (OSError, ValueError):
        return None
