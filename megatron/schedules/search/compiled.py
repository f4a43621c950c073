"""Inner loops as machine code, compiled once for a user and kept in a directory of the user's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.search import event_queue
from megatron.schedules.search.event_queue import Queue
from megatron.schedules.search.list_scheduling import NEVER, Instance, Policy, Space, list_schedule, sound
from megatron.schedules.utils.cache_directory import Directory, code_version, compiled_code, fault_within
from megatron.schedules.utils.cache_lock import locked

_SUMS = "sums.json"
_log = logging.getLogger(__name__)


@cache
def compiled() -> Callable[..., float]:
    """:func:`.list_scheduling.list_schedule`, compiled for arrays, for one signature only."""
    import numba

    ints, floats = numba.int64[::1], numba.float64[::1]
    heap: dict[str, Callable[..., Any]] = {}
    for name in ("first_of", "heappush", "heapreplace", "heappop"):
        heap[name] = numba.njit(calling(getattr(event_queue, name), heap), inline="always")
    signature = numba.float64(tasks_type(), ints, floats, policy_type(), space_type(), ints)
    return kept_code(calling(list_schedule, heap), signature)


def calling(function: Callable[..., Any], others: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """``function``, calling ``others`` instead of what has their names in Python."""
    assert isinstance(function, FunctionType)
    made = FunctionType(function.__code__, function.__globals__ | dict(others), function.__name__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def named_tuple(made: type[tuple[Any, ...]], *fields: Any) -> Any:
    """numba's type of a named tuple ``made`` of ``fields``."""
    import numba

    types: Any = numba.types  # numba's own types are not annotated
    return types.NamedTuple(fields, made)


def tasks_type() -> Any:
    """numba's type of :class:`.Instance` on arrays."""
    import numba

    ints, floats, flags = numba.int64[::1], numba.float64[::1], numba.boolean[::1]
    of_tasks = (ints, ints, floats, floats, flags, flags, ints, floats, flags, ints, ints, ints, floats, ints, flags)
    return named_tuple(Instance, *of_tasks)


def policy_type() -> Any:
    """numba's type of :class:`.Policy`."""
    import numba

    whole, number, flag = numba.int64, numba.float64, numba.boolean
    return named_tuple(Policy, whole, flag, number, flag, number, whole, flag)


def space_type() -> Any:
    """numba's type of :class:`.Space`."""
    import numba

    ints, floats = numba.int64[::1], numba.float64[::1]
    return named_tuple(Space, ints, floats, ints, ints, named_tuple(Queue, floats, ints, ints))


def space_for(tasks: Instance) -> Space:
    """Space for rounds of ``tasks`` in arrays."""
    size, ranks, links = len(tasks.rank), len(tasks.first) - 1, len(tasks.follower)

    def whole(length: int) -> Any:
        return np.empty(length, np.int64)

    def fractions(length: int) -> Any:
        return np.empty(length)

    most = 1 + ranks + links  # a rank's own event, and one whenever something that a task waits for runs
    events = Queue(fractions(most), whole(most), np.ones(1, np.int64))
    events.times[0], events.ranks[0] = NEVER, -1
    return Space(whole(size), fractions(size), whole(size + ranks), whole(size + ranks), events)


def kept_code(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """``function`` compiled for one signature, or its machine code as it was kept.

    numba keeps its code in pickles, and reading one runs it. So they are read only from a directory of this user's in
    which nobody else can have written a file, by one process at a time, and only as they were written. What is not so
    is thrown away and compiled again, and the log says so.
    """
    import numba

    def compile_it(**options: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = numba.njit(signature, nogil=True, **options)(function)
        return made

    with compiled_code(f"{code_version()[:16]}-numba-{numba.__version__}") as directory:
        if directory is None:
            return compile_it()
        with locked(directory, function.__name__) as lock:
            if lock is None or not _usable(directory, function.__name__):
                return compile_it()
            kept = directory.pinned / function.__name__
            try:
                tempfile.TemporaryFile(dir=directory.pinned).close()  # numba tries so too, and else goes elsewhere
                with _kept_in(kept):
                    made = compile_it(cache=True)
            except OSError:  # a full disk
                return compile_it()
            _make_private(kept)
            if _read_sums(kept) != _sums(kept):
                directory.write(f"{function.__name__}/{_SUMS}", json.dumps(_sums(kept)))
            return made


def _usable(directory: Directory, name: str) -> bool:
    """Whether the code kept under ``name`` may be read, or there is none; what may not be read is deleted."""
    kept = directory.pinned / name
    if not os.path.lexists(kept):
        return True
    why = fault_within(kept)
    if why is None and _read_sums(kept) == _sums(kept):
        return True
    _log.warning(
        "pipeline schedule: %s holds machine code other than was put there, or not all of it%s: compiled anew",
        directory.path / name,
        f" ({why})" if why else "",
    )
    with suppress(OSError):
        kept.unlink() if kept.is_symlink() or kept.is_file() else shutil.rmtree(kept)
    return not os.path.lexists(kept)


def _make_private(kept: Path) -> None:
    """Undo what the umask let others do with the files that numba wrote; the directory above kept them out so far."""
    for path in (kept, *kept.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def scheduled(
    tasks: Instance, order: NDArray[np.int64], limits: Sequence[float] | NDArray[np.float64], policy: Policy
) -> tuple[NDArray[np.int64], float]:
    """The order that the compiled function makes of ``order``, and its makespan.

    Args:
        tasks: on arrays.
        order, limits, policy: see :func:`.list_scheduling.list_schedule`.

    Raises:
        ValueError: where the policy cannot be followed, or ``order`` does not keep within ``limits``.
    """
    found = np.empty_like(order)
    makespan = compiled()(tasks, order, np.asarray(limits, np.float64), sound(policy), space_for(tasks), found)
    if makespan >= NEVER:
        raise ValueError("the order cannot run within its limits")
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
