"""Files kept on disk between runs: where they are, one process at a time, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.schedules.planning.progress import Progress, unheard

FOLDER_VARIABLE = "MEGATRON_SCHEDULES_CACHE"
_LOOK_EVERY_S = 0.05


def folder() -> Path:
    """Where files are kept: $MEGATRON_SCHEDULES_CACHE, else the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-schedules"


def code_version() -> str:
    """A name for the planner's code as it is: changed by any change to it."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class Lock:
    """The lock of a file, held by this process; others that wait for it hear how far the work is."""

    def __init__(self, descriptor: int, told: float) -> None:
        self._descriptor, self._done, self._told = descriptor, 0.0, told

    def telling(self, progress: Progress) -> Progress:
        """``progress``, which those who wait hear too; what they were told of another process's work not again."""

        def tell(share: float) -> None:
            self._done += share
            with suppress(OSError):
                os.pwrite(self._descriptor, f"{self._done:.4f}".encode(), 0)
            if self._done > self._told:
                progress(self._done - self._told)
                self._told = self._done

        return tell


@contextmanager
def locked(path: Path, progress: Progress = unheard) -> Iterator[Lock | None]:
    """Hold the lock of ``path``, once whoever has it is done, whose progress is told; None where there can be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield None
        return
    try:
        try:
            told = _wait(descriptor, progress)
        except OSError:  # a file system without locks
            yield None
        else:
            yield Lock(descriptor, told)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, progress: Progress) -> float:
    """Until the lock is ours; how far whoever had it came, as told to ``progress``."""
    told = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            done = _read_share(descriptor)
            if done > told:
                progress(done - told)
                told = done
            time.sleep(_LOOK_EVERY_S)
        else:
            os.ftruncate(descriptor, 0)
            return told


def _read_share(descriptor: int) -> float:
    try:
        return min(1.0, float(os.pread(descriptor, 16, 0)))
    except (OSError, ValueError):  # nothing written yet
        return 0.0


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the machine stops. A full disk costs the next one its time, no more."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
