"""Inner loops as machine code, compiled once for a user and kept in a directory of the user's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.search import event_queue, microbatch_order
from megatron.schedules.search.event_queue import Queue
from megatron.schedules.search.forward_backward import Both, Work, one_round, settle
from megatron.schedules.search.list_scheduling import NEVER, Instance, Policy, Space, list_schedule
from megatron.schedules.search.microbatch_order import Places
from megatron.schedules.utils.cache_directory import Directory, code_version, compiled_code, fault_within
from megatron.schedules.utils.cache_lock import locked

_SUMS = "sums.json"
_log = logging.getLogger(__name__)


@cache
def compiled() -> Callable[..., tuple[float, int]]:
    """:func:`.forward_backward.settle`, compiled for arrays, for one signature only."""
    import numba

    ints, floats, whole, number, policy = *arrays(), numba.int64, numba.float64, policy_type()
    types: Any = numba.types  # numba's own types are not annotated
    result = types.Tuple((number, whole))
    order = (both_type(), ints, floats, policy, policy, numba.boolean, whole, number, work_type(), ints)
    return kept_code(calling(settle, _inner()), result(*order))


@cache
def compiled_climb() -> Callable[..., tuple[float, float]]:
    """:func:`.microbatch_order.climb`, compiled for arrays; the first call on a machine takes some seconds."""
    import numba

    ints, floats, whole, number = *arrays(), numba.int64, numba.float64
    known = {"settle": compiled()} | _inner()
    for function in (microbatch_order.put, microbatch_order.fits):
        known[function.__name__] = numba.njit(calling(function, known))
    places = named_tuple(Places, both_type(), ints, *(floats,) * 4, floats)
    of_microbatches = (floats, floats, ints, ints)
    types: Any = numba.types
    result = types.UniTuple(number, 2)
    choices = (number, whole, whole, number, whole)
    return kept_code(
        calling(microbatch_order.climb, known), result(places, work_type(), *of_microbatches, *choices, ints, ints)
    )


def _inner() -> dict[str, Callable[..., Any]]:
    """What is compiled into the functions that call it."""
    import numba

    known: dict[str, Callable[..., Any]] = {}
    for name in ("first_of", "heappush", "heapreplace", "heappop"):
        known[name] = numba.njit(calling(getattr(event_queue, name), known), inline="always")
    for function in (list_schedule, one_round):
        known[function.__name__] = numba.njit(calling(function, known))
    return known


def calling(function: Callable[..., Any], others: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """``function``, calling ``others`` instead of what has their names in Python."""
    assert isinstance(function, FunctionType)
    made = FunctionType(function.__code__, function.__globals__ | dict(others), function.__name__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def arrays() -> tuple[Any, Any]:
    """numba's types of arrays of whole numbers and of other numbers."""
    import numba

    return numba.int64[::1], numba.float64[::1]


def named_tuple(made: type[tuple[Any, ...]], *fields: Any) -> Any:
    """numba's type of a named tuple ``made`` of ``fields``."""
    import numba

    types: Any = numba.types
    return types.NamedTuple(fields, made)


def both_type() -> Any:
    """numba's type of :class:`.Both` on arrays."""
    import numba

    (ints, floats), flags = arrays(), numba.boolean[::1]
    of_tasks = (ints, ints, floats, floats, flags, flags, ints, floats, flags, ints, ints, ints, floats, ints, flags)
    tasks = named_tuple(Instance, *of_tasks)
    return named_tuple(Both, tasks, tasks, ints)


def policy_type() -> Any:
    """numba's type of :class:`.Policy`."""
    import numba

    whole, number, flag = numba.int64, numba.float64, numba.boolean
    return named_tuple(Policy, whole, flag, number, flag, number, whole, flag)


def work_type() -> Any:
    """numba's type of :class:`.Work`."""
    ints, floats = arrays()
    space = named_tuple(Space, ints, floats, ints, ints, named_tuple(Queue, floats, ints, ints))
    return named_tuple(Work, space, ints, ints)


def work_for(both: Both) -> tuple[Work, NDArray[np.int64]]:
    """Arrays that :func:`.settle` writes, and one for the order that it makes."""
    tasks = both.forward
    size, ranks, links = len(tasks.rank), len(tasks.first) - 1, len(tasks.follower)

    def whole(length: int) -> Any:
        return np.empty(length, np.int64)

    ready: Any = np.empty(size)

    most = 1 + ranks + links  # a rank's own event, and one whenever something that a task waits for runs
    events = Queue(np.empty(most), whole(most), np.ones(1, np.int64))
    events.times[0], events.ranks[0] = NEVER, -1
    space = Space(whole(size), ready, whole(size + ranks), whole(size + ranks), events)
    return Work(space, whole(size), whole(size)), whole(size)


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
