"""Inner loops as machine code, compiled once per user and cached in that user's private folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from megatron.schedules.search import moves
from megatron.schedules.search.forward_backward import Both, Work, one_round, settle
from megatron.schedules.search.list_scheduling import NEVER, Instance, Space, list_schedule, set_left
from megatron.schedules.search.moves import Move, Orders, Rules, Sizes
from megatron.schedules.utils.private_folder import COMPILED, compiled_version, private_folder, warn_once


class Queue(NamedTuple):
    """Heap of events in arrays. Compiled code is much faster with it than with :mod:`heapq` on lists of pairs.

    Args:
        times: time of each event.
        ranks: rank of each event.
        count: number of events, an array of one number.
    """

    times: Any
    ranks: Any
    count: Any


def first_of(events: Queue) -> tuple[float, int]:
    """Returns the earliest event; at equal times the one with the lowest rank."""
    return events.times[0], events.ranks[0]


def heappush(events: Queue, event: tuple[float, int]) -> None:
    """Adds ``event``."""
    times, ranks = events.times, events.ranks
    time, rank = event
    at = events.count[0]
    events.count[0] = at + 1
    while at > 0:
        above = (at - 1) // 2
        if times[above] < time or (times[above] == time and ranks[above] <= rank):
            break
        times[at], ranks[at] = times[above], ranks[above]
        at = above
    times[at], ranks[at] = time, rank


def heapreplace(events: Queue, event: tuple[float, int]) -> None:
    """Replaces the first event with ``event``."""
    times, ranks = events.times, events.ranks
    time, rank = event
    at, below, count = 0, 1, events.count[0]
    while below < count:
        other = below + 1
        if other < count and (
            times[other] < times[below] or (times[other] == times[below] and ranks[other] < ranks[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and rank <= ranks[below]):
            break
        times[at], ranks[at] = times[below], ranks[below]
        at, below = below, 2 * below + 1
    times[at], ranks[at] = time, rank


def heappop(events: Queue) -> None:
    """Removes the first event."""
    events.count[0] -= 1
    heapreplace(events, (events.times[events.count[0]], events.ranks[events.count[0]]))


def _record(made: type[tuple[Any, ...]]) -> Any:
    """Returns numpy's type of the named tuple ``made``. Its fields are numbers or such named tuples."""
    fields = get_type_hints(made).items()
    return np.dtype([(name, _record(kind) if hasattr(kind, "_fields") else kind) for name, kind in fields], align=True)


_MOVES = _record(Move)


def _once[Made](make: Callable[[], Made]) -> Callable[[], Made]:
    """Returns ``make`` for several threads: the first call makes the result, and all others wait for it."""
    made, lock = cache(make), Lock()

    @wraps(make)
    def only() -> Made:
        with lock:
            return made()

    return only


@_once
def compiled_climb() -> Callable[..., tuple[float, float, int, int]]:
    """Compiles :func:`.moves.climb` for arrays. The first call on a machine takes some seconds."""
    import numba

    known: dict[str, Callable[..., Any]] = {}
    on_heaps = first_of, heappush, heapreplace, heappop
    for function in (*on_heaps, list_schedule, set_left, one_round, settle, *moves.CALLED):
        # Python calls none of them. Wrappers for that would take half as long to compile again.
        known[function.__name__] = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(calling(function, known))
    ints, floats, whole, number = *arrays(), numba.int64, numba.float64
    sizes, orders = named_tuple(Sizes, ints, *(floats,) * 7), named_tuple(Orders, ints, ints)
    tasks = (both_type(), floats, sizes, named_tuple(Rules, number, number, whole, number))
    types: Any = numba.types
    if not is_kept():
        warn_once("compiling the search for this machine, which is done once and takes some ten seconds")
    result = types.Tuple((number, number, whole, whole))
    return kept_code(
        calling(moves.climb, known),
        result(*tasks, numba.from_dtype(_MOVES)[::1], number, work_type(), orders, number, orders, number),
    )


def is_kept() -> bool:
    """Checks whether :func:`compiled_climb` loads machine code of an earlier process, instead of compiling."""
    folder = _cache_folder()
    return folder is not None and any(folder.rglob(f"*.{moves.climb.__name__}-*.nbi"))  # numba's index of what it kept


def records(drawn: Iterable[Move]) -> Any:
    """Returns moves as :func:`.moves.climb` takes them: an array whose elements have the fields of :class:`.Move`."""
    return np.array(list(drawn), _MOVES).view(np.recarray)


def calling(function: Callable[..., Any], others: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Returns ``function`` with its calls of the names in ``others`` redirected to these functions."""
    assert isinstance(function, FunctionType)
    made = FunctionType(function.__code__, function.__globals__ | dict(others), function.__name__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def arrays() -> tuple[Any, Any]:
    """Returns numba's types of integer and of float arrays."""
    import numba

    return numba.int64[::1], numba.float64[::1]


def named_tuple(made: type[tuple[Any, ...]], *fields: Any) -> Any:
    """Returns numba's type of the named tuple ``made`` with fields of the types ``fields``."""
    import numba

    types: Any = numba.types
    return types.BaseTuple.from_types(fields, made)


def both_type() -> Any:
    """Returns numba's type of :class:`.Both` on arrays."""
    import numba

    (ints, floats), flags = arrays(), numba.boolean[::1]
    of_tasks = (ints, ints, floats, floats, flags, flags, ints, floats, flags, ints, ints, ints, floats, ints, flags)
    tasks = named_tuple(Instance, *of_tasks, floats, ints, ints)
    return named_tuple(Both, tasks, tasks, ints)


def work_type() -> Any:
    """Returns numba's type of :class:`.Work`."""
    ints, floats = arrays()
    space = named_tuple(
        Space,
        ints,
        floats,
        ints,
        ints,
        named_tuple(Queue, floats, ints, ints),
        floats,
        ints,
        *(floats,) * 4,
        *(ints,) * 5,
    )
    return named_tuple(Work, space, ints, ints)


def work_for(both: Both) -> Work:
    """Allocates the arrays that a climb works in."""
    tasks = both.forward
    size, ranks, links = len(tasks.rank), len(tasks.first) - 1, len(tasks.follower)

    def whole(length: int) -> Any:
        return np.empty(length, np.int64)

    ready: Any = np.empty(size)
    left: Any = np.empty(size)

    most = 1 + ranks + links  # one event per rank and one per precedence
    events = Queue(np.empty(most), whole(most), np.ones(1, np.int64))
    events.times[0], events.ranks[0] = NEVER, -1
    of_tasks: tuple[Any, ...] = (whole(size + ranks), whole(size + ranks), events, left, whole(size))
    of_ranks: tuple[Any, ...] = (*(np.empty(2 * ranks) for _ in range(4)), *(whole(ranks) for _ in range(5)))
    space = Space(whole(size), ready, *of_tasks, *of_ranks)
    return Work(space, whole(size), whole(size))


def kept_code(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compiles ``function`` for one signature, or loads its machine code from numba's cache in the private folder.

    Several processes may do so at once: numba replaces its files as a whole.
    """
    if cache_folder := _cache_folder():
        try:
            return _compiled(function, signature, cache_folder)
        except Exception as error:  # a full disk, or any error that a damaged pickle can raise
            warn_once(f"compiled code is not cached: {cache_folder} cannot be used ({error!r}); deleting it may help")
    return _compiled(function, signature, None)


def _cache_folder() -> Path | None:
    """Returns where machine code of these sources is kept on this machine; None without a private folder."""
    import numba
    from numba.core.registry import cpu_target

    folder = private_folder()
    if folder is None:
        return None
    # numba names files alike for all CPUs, so processes on different machines need different folders.
    cpu = hashlib.sha256(repr(cpu_target.target_context.codegen().magic_tuple()).encode()).hexdigest()[:8]
    return folder / COMPILED / f"{compiled_version()}-{numba.__version__}-{cpu}"


def _njit(**options: bool) -> Callable[..., Any]:
    """Returns numba's decorator with ``options``, some of which its type stubs do not know."""
    import numba

    njit: Any = numba.njit
    made: Callable[..., Any] = njit(**options)
    return made


def _compiled(function: Callable[..., Any], signature: Any, cache_folder: Path | None) -> Callable[..., Any]:
    """Compiles ``function``; loads it from ``cache_folder``, if there is one, or writes it there."""
    made: Any = _njit(nogil=True, no_cfunc_wrapper=True)(function)
    if isinstance(made, FunctionType):  # $NUMBA_DISABLE_JIT
        return made
    if cache_folder:
        with _cache_directory(cache_folder):
            made.enable_caching()
        if not Path(made.stats.cache_path).is_relative_to(cache_folder):  # where another version's code may lie
            raise OSError(f"numba chose {made.stats.cache_path}")
    made.compile(signature)
    made.disable_compile()
    compiled: Callable[..., Any] = made
    return compiled


@contextmanager
def _cache_directory(path: Path) -> Iterator[None]:
    """Sets numba's cache directory to ``path`` while caching is enabled for a function."""
    import numba.core.config

    config: Any = numba.core.config
    usual, config.CACHE_DIR = config.CACHE_DIR, str(path)
    try:
        yield
    finally:
        config.CACHE_DIR = usual
