"""Cache directories: where they are, whether only this user can change them, and files written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PLANS_VARIABLE = "MEGATRON_SCHEDULES_CACHE"
USER_VARIABLE = "XDG_CACHE_HOME"
_NAME = "megatron-schedules"
# The rooms whose code decides what a plan is.
_PLANNING_ROOMS = ("planner", "schedule", "search", "utils")
# Never follow a link, never wait for another process (a FIFO), never leave a descriptor to a child process.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS: dict[Callable[[int], bool], str] = {stat.S_ISDIR: "a directory", stat.S_ISREG: "a regular file"}
_log = logging.getLogger(__name__)


class UntrustedError(OSError):
    """Others than this user and root may have written a file or a directory; ``str(error)`` says why, in one line."""


def plans_directory() -> Path:
    """Directory for plans: $MEGATRON_SCHEDULES_CACHE, else the user's own cache directory."""
    named = os.environ.get(PLANS_VARIABLE)
    return Path(named) if named else _user_directory()


def _user_directory() -> Path:
    """The user's own cache directory, in the temporary directory where the user has no home."""
    named = os.environ.get(USER_VARIABLE)
    try:
        return Path(named or Path.home() / ".cache") / _NAME
    except RuntimeError:  # a container, started for a uid that it does not know
        directory = Path(os.environ.get("TMPDIR") or "/tmp") / f"{_NAME}-{os.geteuid()}"
        warn_once(f"there is no home directory: the cache is {directory}, unless ${USER_VARIABLE} names another")
        return directory


def code_version() -> str:
    """A digest of the planner's code, in the rooms that decide what a plan is: changed by any change to it."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for room in _PLANNING_ROOMS:
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def warn_once(message: str) -> None:
    """Log a warning, the same one only once in a process."""
    _log.warning("pipeline schedule: %s", message)


def fault(status: os.stat_result, is_kind: Callable[[int], bool], user: int) -> str | None:
    """Why others than ``user`` and root may have written a file or a directory; None where they cannot have.

    Args:
        status: of the file or directory itself, not of what a link points to.
        is_kind: ``stat.S_ISREG`` or ``stat.S_ISDIR``, what it must be.
        user: the uid that must own it, if root does not.
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
    """The first :func:`fault` of ``path`` and of all that is in it, preceded by the name of what has it."""
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
    """An open cache directory that only this user and root can change.

    Args:
        path: its path, for messages.
        pinned: a path through its open descriptor. It stays the same directory, even if another user can rename a
            directory above it.
    """

    path: Path
    pinned: Path

    def open(self, name: str, flags: int) -> int:
        """Open a file, made with mode 0600 where ``flags`` say so; returns its descriptor.

        Raises:
            UntrustedError: where others may have written the file.
            OSError: where it cannot be opened.
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
        """The content of a file; raises as :meth:`open` does."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def version(self, name: str) -> tuple[int, int] | None:
        """A value that changes whenever the file is replaced; None where there is none."""
        try:
            status = os.lstat(self.pinned / name)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def write(self, name: str, text: str) -> None:
        """Write all of a file or nothing, whenever the machine stops. Where that fails there is no file, no error."""
        with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=self.pinned, suffix=".part", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, self.pinned / name)
            except OSError:
                Path(file.name).unlink(missing_ok=True)


@contextmanager
def plans() -> Iterator[Directory | None]:
    """The directory for plans, made where it is missing; None, and one line in the log, where it cannot be used.

    A link to it is followed only where the user named it.
    """
    named = bool(os.environ.get(PLANS_VARIABLE))
    with _opened(plans_directory(), (), named, "plans", PLANS_VARIABLE) as directory:
        yield directory


@contextmanager
def compiled_code(version: str) -> Iterator[Directory | None]:
    """The directory for one version's compiled code, as :func:`plans`.

    Reading compiled code runs it. So it is never in a directory for plans, which users copy and share.
    """
    with _opened(_user_directory(), ("compiled", version), False, "compiled code", USER_VARIABLE) as directory:
        yield directory


@contextmanager
def _opened(path: Path, parts: tuple[str, ...], follow: bool, what: str, variable: str) -> Iterator[Directory | None]:
    """``path`` and in it ``parts``, each made and checked in turn.

    Args:
        follow: whether ``path`` may be a symbolic link.
        what: it is for, and the ``variable`` that names another; both for the log.
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
    """Open the directory ``name`` of the open directory ``within``, made with mode 0700 where it is missing."""
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
