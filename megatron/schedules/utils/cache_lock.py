"""Locks of single files in a cache directory: one process makes the file, others wait for it, but not for ever."""

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
from megatron.schedules.utils.progress import Progress, unheard

_LOOK_EVERY_S = 0.05
# The holder writes so often that it is alive; others wait for one that does not for so long, and no longer.
_BEAT_EVERY_S = 5.0
_PATIENCE_S = 60.0
# A holder's record has this length, always: one write replaces all of the one before.
_LENGTH = 128
_FORM = re.compile(rb"([\w.-]{1,64}) (\d{1,10}) (\d{1,12}) ([01]\.\d{4}) *", re.ASCII)


class _Record(NamedTuple):
    """What a holder writes of itself into its lock file.

    Args:
        host, pid: where it runs.
        beat: how often it has written.
        done: the share of its work that is done.
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
        """None where there is none, or where it is damaged."""
        try:
            match = _FORM.fullmatch(os.pread(descriptor, _LENGTH, 0))
        except OSError:
            return None
        return match and _Record(match[1].decode(), int(match[2]), int(match[3]), min(1.0, float(match[4])))


class Lock:
    """A lock that this process holds. Processes that wait for it read in its file how far the work is."""

    def __init__(self, descriptor: int, told: float) -> None:
        self._descriptor, self._told = descriptor, told
        self._record = _Record(socket.gethostname(), os.getpid(), 0, 0.0)
        self._writing = threading.Lock()

    def write(self, share: float = 0.0) -> None:
        """Write that this process is alive, and has done ``share`` more of its work."""
        with self._writing, suppress(OSError):
            self._record = self._record._replace(beat=self._record.beat + 1, done=self._record.done + share)
            os.pwrite(self._descriptor, self._record.written(), 0)

    def telling(self, progress: Progress) -> Progress:
        """``progress``, which processes that wait hear too.

        It is not told again of what another process, which did not finish, had done.
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
    """Hold the lock of the file ``name``; while another process holds it, wait and tell its progress.

    None where there is no lock to hold: it cannot be made, the holder shows no sign of life, or ``until`` is true.
    """
    lock = _acquired(directory, f"{name}.lock", progress, until)
    if lock is None:
        yield None
        return
    descriptor, told = lock
    held, ended = Lock(descriptor, told), threading.Event()
    held.write()

    def beat() -> None:
        while not ended.wait(_BEAT_EVERY_S):
            held.write()

    # A thread, for the work may say nothing for a long time. It stops where the process is stopped, or dies.
    beating = threading.Thread(target=beat, name="cache lock", daemon=True)
    beating.start()
    try:
        yield held
    finally:
        ended.set()
        beating.join()
        with suppress(OSError):
            os.unlink(directory.pinned / f"{name}.lock")
        os.close(descriptor)


def _acquired(
    directory: Directory, name: str, progress: Progress, until: Callable[[], bool]
) -> tuple[int, float] | None:
    """The descriptor of the lock file ``name`` once it is ours, and how much of others' progress was told."""
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
    """Whether the lock is ours in the end."""
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
        silent += _LOOK_EVERY_S  # looks, not the clock: who is stopped itself has not waited


def _is_there(descriptor: int, directory: Directory, name: str) -> bool:
    """Whether the file ``name`` is the one that is open, and not removed by who held it before."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(directory.pinned / name))
    except OSError:
        return False
