"""Cache directories: their location, a check that only this user can change them, and atomic writes."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PLANS_VARIABLE = "MEGATRON_SCHEDULES_CACHE"
USER_VARIABLE = "XDG_CACHE_HOME"
_NAME = "megatron-schedules"
# Packages whose code determines plans.
_PLANNING_ROOMS = ("planner", "schedule", "search", "utils")
# Do not follow links, do not wait for another process (a FIFO), do not pass descriptors to child processes.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS: dict[Callable[[int], bool], str] = {stat.S_ISDIR: "a directory", stat.S_ISREG: "a regular file"}
_log = logging.getLogger(__name__)


class UntrustedError(OSError):
    """Error: a user other than this one and root can write a file or directory. ``str(error)`` is the reason."""


def plans_directory() -> Path:
    """Returns the directory for plans: $MEGATRON_SCHEDULES_CACHE, by default the user's own cache directory."""
    named = os.environ.get(PLANS_VARIABLE)
    return Path(named) if named else _user_directory()


def _user_directory() -> Path:
    """User's own cache directory; in the temporary directory if the user has no home directory."""
    named = os.environ.get(USER_VARIABLE)
    try:
        return Path(named or Path.home() / ".cache") / _NAME
    except RuntimeError:  # a container that runs as an unknown uid
        directory = Path(os.environ.get("TMPDIR") or "/tmp") / f"{_NAME}-{os.geteuid()}"
        warn_once(f"there is no home directory: the cache is {directory}, unless ${USER_VARIABLE} names another")
        return directory


def code_version() -> str:
    """Returns a digest of the code that determines plans. Any change to the code changes it."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for room in _PLANNING_ROOMS:
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def warn_once(message: str) -> None:
    """Logs a warning, once per process for each message."""
    _log.warning("pipeline schedule: %s", message)


def fault(status: os.stat_result, is_kind: Callable[[int], bool], user: int) -> str | None:
    """Returns why a user other than ``user`` and root can write a file or directory; None if none can.

    Args:
        status: status of the file or directory itself; links are not followed.
        is_kind: required type, ``stat.S_ISREG`` or ``stat.S_ISDIR``.
        user: uid that must own it, unless root does.
    """
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not is_kind(status.st_mode):
        return f"it is not {_KINDS[is_kind]}"
    if status.st_uid not in (0, user):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return "other users can write to it (chmod go-w makes it private)"
    return None


def fault_within(path: Path) -> str | None:
    """Returns the first :func:`fault` in ``path`` and its content, after the file's name; None if there is none."""
    if why := fault(path.lstat(), stat.S_ISDIR, os.geteuid()):
        return f"{path.name}: {why}"
    for folder, directories, files in os.walk(path):
        for names, is_kind in ((directories, stat.S_ISDIR), (files, stat.S_ISREG)):
            for name in names:
                if why := fault(Path(folder, name).lstat(), is_kind, os.geteuid()):
                    return f"{name}: {why}"
    return None


@dataclass(frozen=True)
class Directory:
    """Open cache directory that only this user and root can change.

    Args:
        path: its path, for messages.
        pinned: path through its open descriptor. It remains valid even if another user renames a parent directory.
    """

    path: Path
    pinned: Path

    def open(self, name: str, flags: int) -> int:
        """Opens a file and returns its descriptor. With ``O_CREAT`` in ``flags`` a new file has mode 0600.

        Raises:
            UntrustedError: if another user can write the file.
            OSError: if it cannot be opened.
        """
        path = self.path / name
        try:
            descriptor = os.open(self.pinned / name, flags | _SAFELY, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UntrustedError(f"{path} is not used: it is a symbolic link") from None
            raise
        if why := fault(os.fstat(descriptor), stat.S_ISREG, os.geteuid()):
            os.close(descriptor)
            raise UntrustedError(f"{path} is not used: {why}")
        return descriptor

    def read(self, name: str) -> bytes:
        """Returns the content of a file; raises the errors of :meth:`open`."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def version(self, name: str) -> tuple[int, int] | None:
        """Returns a value that changes whenever the file is replaced; None if there is no file."""
        try:
            status = os.lstat(self.pinned / name)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def write(self, name: str, text: str) -> None:
        """Writes a file completely or not at all. If it fails, there is no new file and no error."""
        with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=self.pinned, suffix=".part", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, self.pinned / name)
            except OSError:
                Path(file.name).unlink(missing_ok=True)


def plans() -> AbstractContextManager[Directory | None]:
    """Opens the directory for plans, and creates it if it is missing. If it is unusable, logs a line and yields None.

    A symbolic link is followed only if the user set the directory.
    """
    return _opened(plans_directory(), (), bool(os.environ.get(PLANS_VARIABLE)), "plans", PLANS_VARIABLE)


def compiled_code(version: str) -> AbstractContextManager[Directory | None]:
    """Opens the directory for one version's compiled code, as :func:`plans` does.

    Loading compiled code runs it. So it is never in a directory for plans, which users copy and share.
    """
    return _opened(_user_directory(), ("compiled", version), False, "compiled code", USER_VARIABLE)


@contextmanager
def _opened(path: Path, parts: tuple[str, ...], follow: bool, what: str, variable: str) -> Iterator[Directory | None]:
    """Creates, checks and opens ``path`` and, inside it, each of ``parts``.

    Args:
        follow: whether ``path`` may be a symbolic link.
        what: content of the directory, for the log; ``variable`` can name another directory.
    """
    with ExitStack() as stack:
        try:
            within, shown = None, path.parent
            for name in (str(path), *parts):
                shown /= name
                within = _enter(shown, name, within, follow and within is None)
                stack.callback(os.close, within)
        except OSError as error:
            why = error if isinstance(error, UntrustedError) else f"{shown} cannot be used: {error.strerror or error}"
            warn_once(f"{why}; {what} are not cached unless ${variable} names another directory")
            yield None
            return
        pinned = Path(f"/proc/self/fd/{within}")
        yield Directory(shown, pinned if pinned.exists() else shown)


def _enter(path: Path, name: str, within: int | None, follow: bool) -> int:
    """Opens the directory ``name`` in the open directory ``within``; creates it with mode 0700 if it is missing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags, dir_fd=within)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(name, 0o700, dir_fd=within)
        descriptor = os.open(name, flags, dir_fd=within)
    except NotADirectoryError:
        if path.is_symlink() and not follow:
            raise UntrustedError(f"{path} is not used: it is a symbolic link") from None
        raise
    why = fault(os.fstat(descriptor), stat.S_ISDIR, os.geteuid())
    if why is None:
        return descriptor
    os.close(descriptor)
    raise UntrustedError(f"{path} is not used: {why}")
