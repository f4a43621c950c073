"""Output files: written whole or not at all, and never a wait for a pipe that nobody reads."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def write_text(path: Path, text: str | bytes) -> None:
    """Write ``text`` to ``path`` as UTF-8: all of it, or an :class:`OSError` is raised and ``path`` is as it was.

    A regular file is written beside ``path`` and renamed, so that no reader ever sees a part of it. It keeps the mode
    of the file it replaces; a new one has the mode that the umask allows. A link stays a link: what it points to is
    replaced. What is no regular file (a pipe, a terminal, ``/dev/null``) is written as it is.

    Args:
        path: in a folder that exists. The folder must be writable, where a regular file is written.
        text: any; bytes are written as they are.

    Raises:
        OSError: with ``path`` as its ``filename`` and an ``strerror`` that says what is wrong; for text or a path that
            cannot be encoded, too.
    """
    try:
        _write(path, text)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _write(path: Path, text: str | bytes) -> None:
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, f"its text cannot be encoded: {error.reason}") from None
    mode, target = _find(path)
    if mode is not None and (not stat.S_ISREG(mode) or _is_descriptor(path, target)):
        _write_open(_open_in_place(path), data)
    else:
        _replace(target, data, mode)


def make_folder(path: Path) -> None:
    """Make the folder ``path``, with those that it is in, where they are not there.

    Raises:
        OSError: also where no folder can have this name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise _no_name(error) from None


def objection(path: Path) -> str:
    """Why :func:`write_text` could not write to ``path``; empty where nothing speaks against it. Writes nothing."""
    try:
        mode, target = _find(path)
    except OSError as error:
        return error.strerror or ""
    if mode is not None and (not stat.S_ISREG(mode) or _is_descriptor(path, target)):
        return "" if os.access(path, os.W_OK, effective_ids=True) else os.strerror(errno.EACCES)
    if not target.parent.is_dir():
        return f"there is no folder {path.parent}"
    may = os.access(target.parent, os.W_OK | os.X_OK, effective_ids=True)
    return "" if may else _no_new_file(target.parent, errno.EACCES)


def _find(path: Path) -> tuple[int | None, Path]:
    """The mode of what is at ``path`` (None where nothing is), and the file behind all links."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except ValueError as error:
        raise _no_name(error) from None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return mode, Path(os.path.realpath(path))


def _is_descriptor(path: Path, target: Path) -> bool:
    """Whether ``path`` names an open file, as ``/dev/stdout`` does: whoever opened it would not see another."""
    named = os.path.abspath(path)
    return any(named.startswith(root) and not str(target).startswith(root) for root in ("/dev/", "/proc/"))


def _open_in_place(path: Path) -> int:
    """A descriptor of what is no regular file, or of an open one, which is added to."""
    try:
        # Without O_NONBLOCK a pipe would wait for a reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads from it: start the reader first") from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        raise OSError(error.errno, _no_new_file(target.parent, error.errno)) from None
    try:
        if mode is not None:
            os.fchmod(descriptor, stat.S_IMODE(mode))
        _write_open(descriptor, data, sync=True)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _write_open(descriptor: int, data: bytes, *, sync: bool = False) -> None:
    """Write ``data`` and close. ``sync``: wait for the disk; some file systems find out only then that it is full."""
    with open(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        if sync:
            os.fsync(descriptor)


def _no_name(error: ValueError) -> OSError:
    """A NUL, or characters that the file system's encoding lacks."""
    return OSError(errno.EINVAL, f"no file can have this name: {getattr(error, 'reason', error)}")


def _no_new_file(folder: Path, number: int | None) -> str:
    return f"no file can be made in {folder}: {os.strerror(number or errno.EACCES)}"
