"""Child processes that end with their parent and import nothing from the working directory."""

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
# The child imports the package from the parent's folder, even if another version is installed. So `megatron` is created
# by hand: an import from the path would make it a namespace package over all folders of that name.
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
    """Ends this process as soon as its parent has ended for any reason.

    On Linux the kernel sends the signal. This costs nothing, and works in compiled code that holds the interpreter's
    lock, when no Python thread can run. For Linux the parent is the *thread* that started this process, so start
    children from a thread that outlives them. On other systems a thread checks every second.

    Args:
        parent: process id of the parent; default: the parent in ``multiprocessing``, by fork or spawn.
        by: signal that ends this process.
    """
    if parent is None:
        started_by = parent_process()
        if started_by is None or started_by.pid is None:
            return
        parent = started_by.pid
    if not _signalled_by_kernel(by):
        threading.Thread(target=_watch, args=(parent, by), daemon=True).start()
    if os.getppid() != parent:  # it ended before prctl was called
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
    """Initializes a pool's worker: it ends with its parent and ignores Ctrl-C, which the parent handles."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Pool of new interpreters that are killed if the block raises an exception or this process ends.

    Results should be small: if a worker is killed while it sends a message larger than a pipe's buffer, the pool waits
    forever for the rest.
    """
    others = set(active_children())
    with safe_path(), ProcessPoolExecutor(workers, get_context("spawn"), initializer=begin_worker) as pool:
        try:
            yield pool
        except BaseException:
            for worker in set(active_children()) - others:
                worker.kill()  # otherwise the pool waits for all submitted work
            raise


@contextmanager
def safe_path() -> Iterator[None]:
    """Keeps the working directory off the import path of interpreters that ``multiprocessing`` starts in the block.

    ``multiprocessing`` starts them with ``python -c``, which looks in the working directory first until it has received
    the parent's path.
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
    """Returns the command that runs ``main()`` of a module of this package in a new interpreter.

    The interpreter ends with this process. It has the import path of this process, without the working directory. If
    the package itself is there, that folder comes last, so that it hides no library. Start the command with
    :func:`isolated_environment`.
    """
    root = str(_MEGATRON.parent)
    path = _path_without_working_directory()
    more = [] if root in path else [root]
    return [sys.executable, "-P", "-c", _START, module, str(os.getpid()), str(_MEGATRON), *path, *more]


def isolated_environment() -> dict[str, str]:
    """Returns this process's environment without ``PYTHONPATH``, which :func:`isolated_command` already includes."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _path_without_working_directory() -> list[str]:
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore all others
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return [entry for entry in entries if os.path.isabs(entry)]
    entries = [os.path.join(here, entry) for entry in entries]
    return [entry for entry in entries if os.path.realpath(entry) != os.path.realpath(here)]
