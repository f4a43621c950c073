"""Output files, written completely or not at all. Writing does not block on a pipe without a reader."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def write_text(path: Path, text: str | bytes) -> None:
    """Writes ``text`` to ``path`` as UTF-8. If it fails, ``path`` does not change.

    A regular file is written to a temporary file and renamed, so readers never see a part of it. It keeps the mode of
    the file that it replaces; a new file has the mode that the umask allows. A link is followed: its target is
    replaced. Anything else (a pipe, a terminal, ``/dev/null``) is written in place.

    Args:
        path: output file. Its folder must exist and, for a regular file, be writable.
        text: text, or bytes to be written unchanged.

    Raises:
        OSError: if writing fails, or if the text or the path cannot be encoded. Its ``filename`` is ``path``, and its
            ``strerror`` says what is wrong.
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
    """Creates the folder ``path`` and its parents if they do not exist.

    Raises:
        OSError: if that fails, or if the name is invalid.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise _no_name(error) from None


def objection(path: Path) -> str:
    """Returns the reason why :func:`write_text` cannot write to ``path``; empty if it can. Writes nothing."""
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
    """Mode of ``path`` (None if it does not exist), and the path with all links resolved."""
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
    """True if ``path`` names an open file, such as ``/dev/stdout``, which must not be replaced."""
    named = os.path.abspath(path)
    return any(named.startswith(root) and not str(target).startswith(root) for root in ("/dev/", "/proc/"))


def _open_in_place(path: Path) -> int:
    """Opens an existing pipe, device or open file to append to it."""
    try:
        # Without O_NONBLOCK, opening a pipe would block until it has a reader.
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
    """Writes ``data`` and closes. ``sync`` waits for the disk: some file systems detect only then that it is full."""
    with open(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        if sync:
            os.fsync(descriptor)


def _no_name(error: ValueError) -> OSError:
    """Error for a name with a NUL or with characters that the file system cannot encode."""
    return OSError(errno.EINVAL, f"no file can have this name: {getattr(error, 'reason', error)}")


def _no_new_file(folder: Path, number: int | None) -> str:
    return f"no file can be made in {folder}: {os.strerror(number or errno.EACCES)}"
