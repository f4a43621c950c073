"""Locks of single files in a cache directory: one process creates the file, and others wait for a limited time."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from megatron.schedules.utils.cache_directory import Directory, UntrustedError, warn_once
from megatron.schedules.utils.progress import Progress, repeated, unheard

_LOOK_EVERY_S = 0.05
# Interval at which the holder writes to its lock file, and the time after which others stop waiting for a silent one.
_BEAT_EVERY_S = 5.0
_PATIENCE_S = 60.0
# Fixed length of a record, so that one write replaces all of the previous one.
_LENGTH = 128
_FORM = re.compile(rb"([\w.-]{1,64}) (\d{1,10}) (\d{1,12}) ([01]\.\d{4}) *", re.ASCII)


class _Record(NamedTuple):
    """Record that the holder of a lock writes to the lock file.

    Args:
        host, pid: host and process id of the holder.
        beat: number of writes.
        done: share of its work that is done.
    """

    host: str
    pid: int
    beat: int
    done: float

    def written(self) -> bytes:
        host = re.sub(r"[^\w.-]", "-", self.host, flags=re.ASCII)[:64] or "-"
        return f"{host} {self.pid} {self.beat} {min(1.0, self.done):.4f}".encode().ljust(_LENGTH)

    @staticmethod
    def read(descriptor: int) -> _Record | None:
        """Reads a record; None if it is missing or damaged."""
        try:
            match = _FORM.fullmatch(os.pread(descriptor, _LENGTH, 0))
        except OSError:
            return None
        return match and _Record(match[1].decode(), int(match[2]), int(match[3]), min(1.0, float(match[4])))


class Lock:
    """Lock that this process holds. Waiting processes read the progress from its file."""

    def __init__(self, descriptor: int, told: float) -> None:
        self._descriptor, self._told = descriptor, told
        self._record = _Record(socket.gethostname(), os.getpid(), 0, 0.0)
        self._writing = threading.Lock()

    def write(self, share: float = 0.0) -> None:
        """Writes that this process is alive and has completed another ``share`` of its work."""
        with self._writing, suppress(OSError):
            self._record = self._record._replace(beat=self._record.beat + 1, done=self._record.done + share)
            os.pwrite(self._descriptor, self._record.written(), 0)

    def telling(self, progress: Progress) -> Progress:
        """Returns ``progress``, extended to report to waiting processes, too.

        Progress that an unfinished previous holder already reported is not reported again.
        """

        def tell(share: float) -> None:
            self.write(share)
            if self._record.done > self._told:
                progress(self._record.done - self._told)
                self._told = self._record.done

        return tell


@contextmanager
def locked(
    directory: Directory, name: str, progress: Progress = unheard, until: Callable[[], bool] = lambda: False
) -> Iterator[Lock | None]:
    """Holds the lock of the file ``name``. While another process holds it, waits and reports that process's progress.

    Yields None without a lock: it cannot be created, its holder no longer responds, or ``until`` returned true.
    """
    lock = _acquired(directory, f"{name}.lock", progress, until)
    if lock is None:
        yield None
        return
    descriptor, told = lock
    held = Lock(descriptor, told)
    held.write()
    try:
        with repeated(held.write, _BEAT_EVERY_S, "cache lock"):
            yield held
    finally:
        with suppress(OSError):
            os.unlink(directory.pinned / f"{name}.lock")
        os.close(descriptor)


def _acquired(
    directory: Directory, name: str, progress: Progress, until: Callable[[], bool]
) -> tuple[int, float] | None:
    """Acquires the lock file ``name``. Returns its descriptor, and the progress of others already reported."""
    told = 0.0

    def tell(done: float) -> None:
        nonlocal told
        if done > told:
            progress(done - told)
            told = done

    while True:
        try:
            descriptor = directory.open(name, os.O_RDWR | os.O_CREAT)
        except UntrustedError as error:
            warn_once(f"{error}; planned without a lock")
            return None
        except OSError:  # a directory that can only be read, or a full disk
            return None
        try:
            mine = _wait(descriptor, directory, name, tell, until)
        except OSError:  # a file system without locks
            mine = False
        except BaseException:
            os.close(descriptor)
            raise
        if mine and _is_there(descriptor, directory, name):
            return descriptor, told
        os.close(descriptor)
        if not mine:
            return None


def _wait(
    descriptor: int, directory: Directory, name: str, tell: Callable[[float], None], until: Callable[[], bool]
) -> bool:
    """Waits for the lock. Returns true if this process acquired it."""
    last, silent = _Record.read(descriptor), 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        if until():
            return False
        now = _Record.read(descriptor)
        if now != last:
            last, silent = now, 0.0
        if now is not None:
            tell(now.done)
        if silent >= _PATIENCE_S:
            holder = "a process that is not known" if now is None else f"process {now.pid} on {now.host}"
            warn_once(
                f"{directory.path / name} is locked by {holder}, which has shown no progress for {silent:.0f} s: "
                "going on without waiting for it; end that process if it hangs"
            )
            return False
        time.sleep(_LOOK_EVERY_S)
        silent += _LOOK_EVERY_S  # counts looks, not clock time: time in which this process was stopped does not count


def _is_there(descriptor: int, directory: Directory, name: str) -> bool:
    """True if the file ``name`` is still the open one, so the previous holder has not removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(directory.pinned / name))
    except OSError:
        return False
