"""Child processes: they end with their parent, and import nothing from the folder in which they are started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_MEGATRON = Path(__file__).absolute().parents[2]  # the folder that holds megatron/schedules
# The package comes from where the parent has it, whichever other version is installed. `megatron` is made by hand for
# that: found on the path, it would be a namespace over all folders of that name.
_START = """
import importlib, sys, types
module, parent, megatron, *path = sys.argv[1:]
sys.modules["megatron"] = types.ModuleType("megatron")
sys.modules["megatron"].__path__ = [megatron]
sys.path[:] = path
importlib.import_module("megatron.schedules.utils.child_processes").end_with_parent(int(parent))
importlib.import_module(module).main()
"""


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Ends this process as soon as its parent is gone, however that ended.

    Linux sends the signal. That costs nothing, and works within compiled code that holds the interpreter's lock, where
    a thread of this process could not run. Linux takes the *thread* that started this process for its parent: start
    children from a thread that outlives them. On other systems a thread of this process looks every second.

    Args:
        parent: the parent's process id. Without it, that of the parent in ``multiprocessing``, by fork or spawn.
        by: the signal to end with.
    """
    if parent is None:
        started_by = parent_process()
        if started_by is None or started_by.pid is None:
            return
        parent = started_by.pid
    if not _signalled_by_kernel(by):
        threading.Thread(target=_watch, args=(parent, by), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), by)


def _signalled_by_kernel(by: signal.Signals) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent: int, by: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), by)


def begin_worker() -> None:
    """Initializer of a pool's worker: it ends with its parent, which alone decides what Ctrl-C does."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new interpreters, killed when the block ends by an exception or this process ends in any way.

    Results should be small. A worker killed amid a message larger than a pipe's buffer leaves the pool waiting for the
    rest of it.
    """
    others = set(active_children())
    with safe_path(), ProcessPoolExecutor(workers, get_context("spawn"), initializer=begin_worker) as pool:
        try:
            yield pool
        except BaseException:
            for worker in set(active_children()) - others:
                worker.kill()  # or the pool would wait for all that was submitted
            raise


@contextmanager
def safe_path() -> Iterator[None]:
    """Keeps the working directory off the import path of interpreters that ``multiprocessing`` starts meanwhile.

    It starts them with ``python -c``, which looks there first until the parent's path has arrived.
    """
    name = "PYTHONSAFEPATH"
    kept = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if kept is None:
            del os.environ[name]
        else:
            os.environ[name] = kept


def isolated_command(module: str) -> list[str]:
    """The command that calls ``main()`` of a module of this package in a new interpreter, which ends with this process.

    The interpreter imports from where this process does, except from the working directory. If the package itself lies
    there, that folder comes last, so that it stands in for no library. Start it with :func:`isolated_environment`.
    """
    root = str(_MEGATRON.parent)
    path = _path_without_working_directory()
    more = [] if root in path else [root]
    return [sys.executable, "-P", "-c", _START, module, str(os.getpid()), str(_MEGATRON), *path, *more]


def isolated_environment() -> dict[str, str]:
    """This process's environment without ``PYTHONPATH``, which :func:`isolated_command` has in its import path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _path_without_working_directory() -> list[str]:
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # imports pass over all others
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return [entry for entry in entries if os.path.isabs(entry)]
    entries = [os.path.join(here, entry) for entry in entries]
    return [entry for entry in entries if os.path.realpath(entry) != os.path.realpath(here)]
